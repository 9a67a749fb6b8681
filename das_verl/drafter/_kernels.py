"""Native kernels over one tree block.

A block is a flat int32 array: a header, a table of transitions and the states.

    header   HEADER words, named below
    table    4 words a slot: state, token, target, next slot of the same state (0 ends the list)
    states   8 words a state, the fields below; state 0 means "none", state 1 is the root

A state's first transition sits in the state itself (NEXT); only branching states own slots of the table,
which is open addressing with linear probing. Zero means "empty" everywhere, so a fresh zeroed mapping is
an empty tree, and the part of a block that was never used costs no memory.

Kernels address blocks by pointer, so that one call serves any number of trees, and release the GIL.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

HEADER = 16
STATES, CAPACITY, UNITS, SLOTS, USED_SLOTS, TOKENS, CUT, FROZEN = range(8)  # header words; CAPACITY is in units
SLOT_WORDS, STATE_WORDS = 4, 8
LENGTH, LINK, COUNT, BEST, NEXT, TOKEN, EXTRA, BEST_COUNT = range(8)  # fields of a state
ROOT = 1

# A verified token updates the counts of at most this many contexts, longest first (see `tree`).
DEPTH = 64

# Waits for memory overlap: finished sequences are inserted in turns, all rows of a batch draft a token before any
# drafts its next, and what is needed soon is prefetched.
LANES = 4  # sequences inserted in turns
LEGS = 3  # dependent loads on the way to a drafted token
AHEAD = 16  # states or slots that the counting passes look ahead

# Fields of a sequence row.
STATE, MATCH, WEIGHT, MODEL = range(4)
ROW_WORDS = 4

# The acceptance model: a logistic function of a token's features in the contexts it is drafted from.
CONTEXTS = 3  # the longest ones are looked at
CANDIDATES = 2  # of these the best continuations are compared
SURE = 0.5  # log odds of a share (0.62) beyond which no other token is looked at
FEATURES = 7
LEARNT = 32  # positions of a draft that are learnt from
RATE_START, RATE_DECAY = 0.6, 0.95
_LOG = np.log(np.arange(4096) + 0.5)

_K1 = np.uint64(0x9E3779B97F4A7C15)
_K2 = np.uint64(0xC2B2AE3D27D4EB4F)
_32 = np.uint64(32)


def slots_for(units):
    """Table slots that can never fill up: a tree of `units` needs at most `units` of them."""
    return (units + units // 8 + 16) // 2 * 2


def words_for(units):
    """Words of a block for `units` (a token counts one unit, a sequence one more): twice as many states."""
    return HEADER + SLOT_WORDS * slots_for(units) + STATE_WORDS * (2 * units + 2)


@intrinsic
def _pointer(typingctx, address):
    signature = types.CPointer(types.int32)(types.int64)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(32).as_pointer())

    return signature, codegen


@intrinsic
def _prefetch(typingctx, block, index):
    """Ask for the cache line of block[index] without waiting for it; any index is allowed."""

    def codegen(context, builder, signature, args):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        address = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        builder.call(prefetch, [address, word(0), word(3), word(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(block, types.int64), codegen


@njit(nogil=True)
def _base(block):
    return np.int64(HEADER + SLOT_WORDS * block[SLOTS])


@njit(nogil=True)
def _home(block, state, token):
    """Offset of the slot where (state, token) is looked for first."""
    h = np.uint64(state) * _K1 + np.uint64(token) * _K2
    h = (h ^ (h >> _32)) * _K1
    return np.int64(HEADER) + SLOT_WORDS * np.int64(((h >> _32) * np.uint64(block[SLOTS])) >> _32)


@njit(nogil=True)
def _slot(block, state, token):
    """Offset of the slot holding (state, token), or of the empty slot where it belongs."""
    at = _home(block, state, token)
    end = HEADER + SLOT_WORDS * np.int64(block[SLOTS])
    while block[at] != 0 and (block[at] != state or block[at + 1] != token):
        at += SLOT_WORDS
        if at == end:
            at = np.int64(HEADER)
    return at


@njit(nogil=True)
def _follow(block, base, state, token):
    """Target of the transition (state, token), 0 if there is none."""
    at = base + STATE_WORDS * state
    target = np.int64(block[at + NEXT])
    if target == 0 or block[base + STATE_WORDS * target + TOKEN] == token:
        return target
    if block[at + EXTRA] == 0:
        return np.int64(0)
    return np.int64(block[_slot(block, state, token) + 2])


@njit(nogil=True)
def _connect(block, base, state, token, target):
    """Add a transition that does not exist yet."""
    at = base + STATE_WORDS * state
    if block[at + NEXT] == 0:
        block[at + NEXT] = target
    else:
        slot = _slot(block, state, token)
        block[slot] = state
        block[slot + 1] = token
        block[slot + 2] = target
        block[slot + 3] = block[at + EXTRA]
        block[at + EXTRA] = slot // SLOT_WORDS
        block[USED_SLOTS] += 1


@njit(nogil=True)
def _new_state(block, base, length, token):
    state = np.int64(block[STATES])
    block[STATES] = state + 1
    block[base + STATE_WORDS * state + LENGTH] = length
    block[base + STATE_WORDS * state + TOKEN] = token
    return state


@njit(nogil=True)
def _split(block, base, source, token, old, counted):
    """Split off `old` the strings no longer than source + token; return their state.

    Its occurrences are those of `old`, unless states are not `counted` yet: then they hold their own ones only.
    """
    a = base + STATE_WORDS * old
    new = _new_state(block, base, block[base + STATE_WORDS * source + LENGTH] + 1, token)
    b = base + STATE_WORDS * new
    link = np.int64(block[a + LINK])
    block[b + LINK] = link
    if counted:
        block[b + COUNT] = block[a + COUNT]
        block[b + BEST] = block[a + BEST]
        block[b + BEST_COUNT] = block[a + BEST_COUNT]
    block[b + NEXT] = block[a + NEXT]
    slot = np.int64(block[a + EXTRA]) * SLOT_WORDS
    while slot != 0:
        _connect(block, base, new, block[slot + 1], block[slot + 2])
        slot = np.int64(block[slot + 3]) * SLOT_WORDS
    block[a + LINK] = new
    # Contexts whose strings with the token are no longer than those of `link` lead there. Their lengths tell without
    # a look at the table.
    longest = block[base + STATE_WORDS * link + LENGTH]
    while source != 0 and block[base + STATE_WORDS * source + LENGTH] >= longest:
        at = base + STATE_WORDS * source
        if block[at + NEXT] == old:
            block[at + NEXT] = new
        else:
            block[_slot(block, source, token) + 2] = new
        if block[at + BEST] == old:
            block[at + BEST] = new
        source = np.int64(block[at + LINK])
    return new


@njit(nogil=True)
def _extend(block, base, last, token, counted):
    """Append one token to the sequence whose state is `last`; return its new state (`counted`: see `_split`)."""
    old = _follow(block, base, last, token)
    if old != 0:
        if block[base + STATE_WORDS * old + LENGTH] == block[base + STATE_WORDS * last + LENGTH] + 1:
            return old
        return _split(block, base, last, token, old, counted)
    new = _new_state(block, base, block[base + STATE_WORDS * last + LENGTH] + 1, token)
    p = last
    while True:
        _connect(block, base, p, token, new)
        p = np.int64(block[base + STATE_WORDS * p + LINK])
        if p == 0:
            block[base + STATE_WORDS * new + LINK] = ROOT
            return new
        old = _follow(block, base, p, token)
        if old != 0:
            break
    if block[base + STATE_WORDS * old + LENGTH] != block[base + STATE_WORDS * p + LENGTH] + 1:
        old = _split(block, base, p, token, old, counted)
    block[base + STATE_WORDS * new + LINK] = old
    return new


@njit(nogil=True)
def _prefer(block, base, state, target):
    """Make `target` the best continuation of `state` if it is more frequent, or as frequent and smaller."""
    at = base + STATE_WORDS * state
    a = base + STATE_WORDS * target
    count = block[a + COUNT]
    best = np.int64(block[at + BEST])
    # BEST_COUNT spares a visit of the best continuation, except on a tie.
    if (
        best == target
        or count > block[at + BEST_COUNT]
        or (count == block[at + BEST_COUNT] and block[a + TOKEN] < block[base + STATE_WORDS * best + TOKEN])
    ):
        block[at + BEST] = target
        block[at + BEST_COUNT] = count


@njit(nogil=True)
def _count(block, base, p, state, weight):
    """Count one more occurrence of the contexts ending in `state`, reached from `p`; longest first."""
    for _ in range(DEPTH):
        at = base + STATE_WORDS * state
        link = np.int64(block[at + LINK])
        block[at + COUNT] += weight
        if link == 0:
            return
        shorter = block[base + STATE_WORDS * link + LENGTH]
        while p != 0 and block[base + STATE_WORDS * p + LENGTH] >= shorter:
            _prefer(block, base, p, state)
            p = np.int64(block[base + STATE_WORDS * p + LINK])
        state = link
    block[CUT] = 1


@njit(nogil=True, cache=True)
def init(address, units):
    """Turn a zeroed block into an empty tree."""
    block = _pointer(address)
    block[CAPACITY] = units
    block[SLOTS] = (units + units // 8 + 16) // 2 * 2
    block[STATES] = ROOT + 1


@njit(nogil=True)
def _expect(block, base, state, token):
    """Prefetch what appending `token` to the sequence whose state is `state` will read first."""
    for _ in range(2):
        state = np.int64(block[base + STATE_WORDS * state + LINK])
        at = base + STATE_WORDS * state
        _prefetch(block, _home(block, state, token))
        _prefetch(block, base + STATE_WORDS * np.int64(block[at + NEXT]))


@njit(nogil=True)
def _insert(block, base, tokens, bounds, weights):
    """Insert the sequences; their weights are left with the states they pass."""
    n = bounds.size - 1
    position = np.zeros(LANES, np.int64)
    end = np.zeros(LANES, np.int64)
    state = np.zeros(LANES, np.int64)
    weight = np.zeros(LANES, np.int32)
    started = np.int64(0)
    left = bounds[n] - bounds[0]
    while left > 0:
        for lane in range(LANES):
            while position[lane] == end[lane] and started < n:
                position[lane] = bounds[started]
                end[lane] = bounds[started + 1]
                state[lane] = ROOT
                weight[lane] = weights[started]
                started += 1
            at = position[lane]
            if at == end[lane]:
                continue
            state[lane] = _extend(block, base, state[lane], tokens[at], False)
            block[base + STATE_WORDS * state[lane] + COUNT] += weight[lane]
            position[lane] = at + 1
            left -= 1
            if at + 1 < end[lane]:
                _expect(block, base, state[lane], tokens[at + 1])


@njit(nogil=True)
def _take_apart(block, base):
    """Leave with each state its own occurrences only, those that no longer context has."""
    states = np.int64(block[STATES])
    counts = np.empty(states, np.int32)
    for s in range(states):
        counts[s] = block[base + STATE_WORDS * s + COUNT]
        block[base + STATE_WORDS * s + BEST] = 0
        block[base + STATE_WORDS * s + BEST_COUNT] = 0
    for s in range(ROOT + 1, states):
        block[base + STATE_WORDS * np.int64(block[base + STATE_WORDS * s + LINK]) + COUNT] -= counts[s]


@njit(nogil=True)
def _sum_up(block, base):
    """Add each state's own occurrences to those of its shorter contexts.

    BEST_COUNT serves as the number of longer contexts that have not arrived yet; it is -1 in the end.
    """
    states = np.int64(block[STATES])
    for s in range(ROOT + 1, states):
        block[base + STATE_WORDS * np.int64(block[base + STATE_WORDS * s + LINK]) + BEST_COUNT] += 1
    # A state is passed on once all longer ones arrived in it.
    for s in range(ROOT + 1, states):
        ahead = s + AHEAD if s + AHEAD < states else s
        _prefetch(block, base + STATE_WORDS * np.int64(block[base + STATE_WORDS * ahead + LINK]))
        at = base + STATE_WORDS * s
        while block[at + BEST_COUNT] == 0:
            block[at + BEST_COUNT] = -1
            link = np.int64(block[at + LINK])
            if link == 0:
                break
            count = block[at + COUNT]
            at = base + STATE_WORDS * link
            block[at + COUNT] += count
            block[at + BEST_COUNT] -= 1


@njit(nogil=True, cache=True)
def build(address, tokens, bounds, weights):
    """Add finished sequences tokens[bounds[i]:bounds[i+1]]; counts are exact afterwards."""
    block = _pointer(address)
    base = _base(block)
    if block[UNITS] > 0:
        _take_apart(block, base)
    _insert(block, base, tokens, bounds, weights)
    block[UNITS] += bounds.size - 1 + tokens.size
    block[TOKENS] += tokens.size
    _sum_up(block, base)
    for s in range(ROOT, np.int64(block[STATES])):
        at = base + STATE_WORDS * s
        block[at + BEST_COUNT] = 0
        target = np.int64(block[at + NEXT])
        if target != 0:
            _prefer(block, base, s, target)
    end = HEADER + SLOT_WORDS * np.int64(block[SLOTS])
    for slot in range(HEADER, end, SLOT_WORDS):
        ahead = slot + AHEAD * SLOT_WORDS if slot + AHEAD * SLOT_WORDS < end else slot
        _prefetch(block, base + STATE_WORDS * np.int64(block[ahead]))
        _prefetch(block, base + STATE_WORDS * np.int64(block[ahead + 2]))
        if block[slot] != 0:
            _prefer(block, base, np.int64(block[slot]), np.int64(block[slot + 2]))


@njit(nogil=True, cache=True)
def move(source, target):
    """Copy a tree into a larger, initialised block."""
    a = _pointer(source)
    b = _pointer(target)
    a_base = _base(a)
    b_base = _base(b)
    for i in (STATES, UNITS, TOKENS, CUT):
        b[i] = a[i]
    for i in range(STATE_WORDS * np.int64(a[STATES])):
        b[b_base + i] = a[a_base + i]
    for s in range(np.int64(a[STATES])):
        b[b_base + STATE_WORDS * s + EXTRA] = 0
    for i in range(np.int64(a[SLOTS])):
        slot = HEADER + SLOT_WORDS * i
        if a[slot] != 0:
            _connect(b, b_base, np.int64(a[slot]), a[slot + 1], np.int64(a[slot + 2]))


@njit(nogil=True)
def _context(block, base, rows, r):
    """State and length of the longest suffix of a row's sequence that also occurs elsewhere in the tree."""
    state = np.int64(rows[r, STATE])
    if rows[r, MATCH] >= 0:
        return state, np.int64(rows[r, MATCH])
    at = base + STATE_WORDS * state
    # A sequence as a whole can only occur elsewhere in other sequences, which would be counted.
    if block[at + COUNT] == rows[r, WEIGHT]:
        state = np.int64(block[at + LINK])
    return state, np.int64(block[base + STATE_WORDS * state + LENGTH])


@njit(nogil=True)
def _match(block, base, state, length, token):
    """Longest suffix of (the last `length` tokens of `state`) + token that is in the tree."""
    while True:
        target = _follow(block, base, state, token)
        if target != 0:
            return target, length + 1
        state = np.int64(block[base + STATE_WORDS * state + LINK])
        if state == 0:
            return np.int64(ROOT), np.int64(0)
        length = np.int64(block[base + STATE_WORDS * state + LENGTH])


@njit(nogil=True)
def _log(n):
    return _LOG[min(n, _LOG.size - 1)]


@njit(nogil=True, error_model="numpy")
def _evidence(block, base, state, target, token, own):
    """What the longest contexts say of `token`, which leads from `state` to `target` (0: nowhere).

    `own` of the contexts' counts are void: the end that is drafted from. Returns the log odds of the token's
    share blended over contexts (each counts as one more observation for the next longer one) and of its share
    in the shortest of them, and the logarithm of the second longest context's length.
    """
    hits = 0.0  # share = hits / trials
    trials = 1.0
    count = total = second = np.int64(0)
    for i in range(CONTEXTS):
        at = base + STATE_WORDS * state
        count = np.int64(block[base + STATE_WORDS * target + COUNT])
        total = max(count, np.int64(block[at + COUNT]) - own)
        hits = hits * (total + 1.0) + count
        trials *= total + 1.0
        if i == 1:
            second = np.int64(block[at + LENGTH])
        state = np.int64(block[at + LINK])
        if state <= ROOT:
            break
        if target == 0:
            target = _follow(block, base, state, token)
        else:
            # The token after the next shorter context leads to the same state or to its link.
            link = np.int64(block[base + STATE_WORDS * target + LINK])
            if block[base + STATE_WORDS * link + LENGTH] > block[base + STATE_WORDS * state + LENGTH]:
                target = link
    return np.log(hits / (trials - hits)), _log(count) - _log(total - count), _log(second)


@njit(nogil=True)
def _score(models, m, blended, shortest, length, second, rate):
    """The acceptance model: a constant and six features, in this order."""
    return (
        models[m, 0]
        + models[m, 1] * blended
        + models[m, 2] * shortest
        + models[m, 3] * length
        + models[m, 4] * second
        + models[m, 5] * rate
        + models[m, 6] * rate * length
    )


@njit(nogil=True)
def _choose(block, base, state, length, own, rate, models, m, features, r, n):
    """The likeliest of the best continuations of the longest contexts.

    Returns the token, its score, and the state and match length after it; its features are in features[r, n].
    """
    matched = _log(length)
    target = np.int64(block[base + STATE_WORDS * state + BEST])
    token = block[base + STATE_WORDS * target + TOKEN]
    blended, shortest, second = _evidence(block, base, state, target, token, own)
    z = _score(models, m, blended, shortest, matched, second, rate)
    context = state
    for _ in range(1, CANDIDATES):
        if blended > SURE:
            break
        context = np.int64(block[base + STATE_WORDS * context + LINK])
        if context <= ROOT:
            break
        best = np.int64(block[base + STATE_WORDS * context + BEST])
        rival = block[base + STATE_WORDS * best + TOKEN]
        if rival == token:
            continue
        best = _follow(block, base, state, rival)
        a, b, second = _evidence(block, base, state, best, rival, own)
        rival_z = _score(models, m, a, b, matched, second, rate)
        if rival_z > z:
            token, z, target, blended, shortest = rival, rival_z, best, a, b
    features[r, n, 0] = 1.0
    features[r, n, 1] = blended
    features[r, n, 2] = shortest
    features[r, n, 3] = matched
    features[r, n, 4] = second
    features[r, n, 5] = rate
    features[r, n, 6] = rate * matched
    while target == 0:
        state = np.int64(block[base + STATE_WORDS * state + LINK])
        length = np.int64(block[base + STATE_WORDS * state + LENGTH])
        target = _follow(block, base, state, token)
    return token, z, target, length + 1


@njit(nogil=True)
def _learn(models, m, features, drafts, r, tokens, first, last, rate):
    """One step of logistic regression for each drafted token whose predecessors were all accepted.

    Returns the number of accepted tokens.
    """
    accepted = 0
    for n in range(min(drafts[r, 0], last - first)):
        hit = drafts[r, 1 + n] == tokens[first + n]
        if n < LEARNT:
            # A view of these features would cost atomic counts of references.
            z = _score(
                models, m, features[r, n, 1], features[r, n, 2], features[r, n, 3], features[r, n, 4], features[r, n, 5]
            )
            error = (1.0 if hit else 0.0) - 1.0 / (1.0 + np.exp(-z))
            for f in range(FEATURES):
                models[m, f] += rate * error * features[r, n, f]
        if not hit:
            break
        accepted += 1
    drafts[r, 0] = 0
    return accepted


@njit(nogil=True, cache=True)
def advance(addresses, trees, rows, rates, drafts, features, models, which, tokens, counts, done, learning_rate):
    """Feed the next counts[i] of the tokens, but for the first done[i], to row which[i]; `done` counts what was taken.

    Returns the number of rows that stopped because their tree is full, and the number of tokens found to be drafted
    right. Where tokens[j] is no token id, or the counts are negative or do not add up (j: all tokens), the former is
    -1 - j and nothing is changed. Rows without a tree take everything and do nothing.
    """
    end = np.int64(0)
    for i in range(counts.size):
        if counts[i] < 0 or counts[i] > tokens.size - end:
            return -1 - tokens.size, 0
        end += counts[i]
    if end != tokens.size:
        return -1 - tokens.size, 0
    for j in range(tokens.size):
        if tokens[j] < 0 or tokens[j] == 2147483647:
            return -1 - j, 0
    stopped = 0
    accepted = 0
    end = np.int64(0)
    for i in range(which.size):
        r = which[i]
        begin = end
        end += counts[i]
        first = begin + done[i]
        done[i] = counts[i]
        if i + 1 < which.size and counts[i + 1] > 0 and addresses[trees[which[i + 1]]] != 0:
            block = _pointer(addresses[trees[which[i + 1]]])
            _expect(block, _base(block), np.int64(rows[which[i + 1], STATE]), tokens[end])
        if addresses[trees[r]] == 0:
            continue
        block = _pointer(addresses[trees[r]])
        base = _base(block)
        if drafts[r, 0] > 0 and done[i] > 0:
            accepted += _learn(models, rows[r, MODEL], features, drafts, r, tokens, first, end, learning_rate)
        for j in range(first, end):
            state, length = _context(block, base, rows, r)
            best = np.int64(block[base + STATE_WORDS * state + BEST])
            hit = 1.0 if block[base + STATE_WORDS * best + TOKEN] == tokens[j] and best != 0 else 0.0
            rates[r] += (1.0 - RATE_DECAY) * (hit - rates[r])
            if rows[r, MATCH] < 0:
                last = np.int64(rows[r, STATE])
                units = 2 if last == ROOT else 1
                if block[UNITS] + units <= block[CAPACITY]:
                    new = _extend(block, base, last, tokens[j], True)
                    _count(block, base, last, new, rows[r, WEIGHT])
                    rows[r, STATE] = new
                    block[UNITS] += units
                    block[TOKENS] += 1
                    continue
                if block[FROZEN] == 0:
                    done[i] = j - begin
                    stopped += 1
                    break
            rows[r, STATE], rows[r, MATCH] = _match(block, base, state, length, tokens[j])
    return stopped, accepted


@njit(nogil=True)
def _approach(block, base, state, leg):
    """Prefetch what `_choose` reads from `state` on, in LEGS legs: each needs what the one before asked for."""
    at = base + STATE_WORDS * state
    best = base + STATE_WORDS * np.int64(block[at + BEST])
    link = base + STATE_WORDS * np.int64(block[at + LINK])
    if leg == 0:
        _prefetch(block, best)
        _prefetch(block, link)
        return
    below = base + STATE_WORDS * np.int64(block[best + LINK])
    rival = base + STATE_WORDS * np.int64(block[link + BEST])
    if leg == 1:
        _prefetch(block, below)
        _prefetch(block, rival)
        _prefetch(block, base + STATE_WORDS * np.int64(block[link + LINK]))
        return
    _prefetch(block, base + STATE_WORDS * np.int64(block[below + LINK]))
    if block[at + EXTRA] != 0:
        _prefetch(block, _home(block, state, block[rival + TOKEN]))
        _prefetch(block, base + STATE_WORDS * np.int64(block[at + NEXT]))


@njit(nogil=True, cache=True)
def propose(
    addresses,
    trees,
    rows,
    rates,
    drafts,
    features,
    models,
    which,
    budgets,
    min_probs,
    out_tokens,
    out_probs,
    out_counts,
):
    """Draft for row which[i] at most budgets[i] tokens, while their chance to be accepted is min_probs[i].

    All rows draft their first token, then all their second, and so on, so that their waits for memory overlap.
    Returns the number of drafted tokens.
    """
    active = np.empty(which.size, np.int64)
    block_of = np.empty(which.size, np.int64)
    base_of = np.empty(which.size, np.int64)
    state_of = np.empty(which.size, np.int64)
    length_of = np.empty(which.size, np.int64)
    left = np.int64(0)
    for i in range(which.size):
        out_counts[i] = 0
        address = addresses[trees[which[i]]]
        if budgets[i] > 0 and address != 0:
            block_of[i] = address
            base_of[i] = _base(_pointer(address))
            _prefetch(_pointer(address), base_of[i] + STATE_WORDS * np.int64(rows[which[i], STATE]))
            active[left] = i
            left += 1
    for a in range(left):
        i = active[a]
        r = which[i]
        state_of[i], length_of[i] = _context(_pointer(block_of[i]), base_of[i], rows, r)
        _prefetch(_pointer(block_of[i]), base_of[i] + STATE_WORDS * state_of[i])
    total = 0
    n = 0
    while left > 0:
        for leg in range(LEGS):
            for a in range(left):
                i = active[a]
                _approach(_pointer(block_of[i]), base_of[i], state_of[i], leg)
        running = left
        left = np.int64(0)
        for a in range(running):
            i = active[a]
            r = which[i]
            block = _pointer(block_of[i])
            base = base_of[i]
            state = state_of[i]
            length = length_of[i]
            # At a sequence's end, what it repeats may go on elsewhere.
            while state > ROOT and block[base + STATE_WORDS * state + BEST] == 0:
                state = np.int64(block[base + STATE_WORDS * state + LINK])
                length = np.int64(block[base + STATE_WORDS * state + LENGTH])
            if state <= ROOT:
                continue
            own = rows[r, WEIGHT] if n == 0 and rows[r, MATCH] < 0 else 0
            token, z, state, length = _choose(
                block, base, state, length, own, rates[r], models, rows[r, MODEL], features, r, min(n, LEARNT)
            )
            prob = (out_probs[i, n - 1] if n > 0 else 1.0) / (1.0 + np.exp(-z))
            if prob < min_probs[i]:
                continue
            out_tokens[i, n] = token
            out_probs[i, n] = prob
            out_counts[i] = n + 1
            total += 1
            if n < LEARNT:
                drafts[r, 1 + n] = token
            if n + 1 < budgets[i]:
                state_of[i] = state
                length_of[i] = length
                active[left] = i
                left += 1
                _prefetch(block, base + STATE_WORDS * state)
        n += 1
    for i in range(which.size):
        drafts[which[i], 0] = min(np.int64(out_counts[i]), LEARNT)
    return total


@njit(nogil=True, cache=True)
def context(address, rows, r):
    """Length of the match a row drafts from."""
    block = _pointer(address)
    return _context(block, _base(block), rows, r)[1]


@njit(nogil=True, cache=True)
def find(address, tokens):
    """State of a string, 0 if it does not occur."""
    block = _pointer(address)
    base = _base(block)
    state = np.int64(ROOT)
    for token in tokens:
        state = _follow(block, base, state, token)
        if state == 0:
            break
    return state
