"""The drafter's benchmark: all its figures on a slice of the shipped rollouts, and what it says of bad input."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_drafter.py"
spec = importlib.util.spec_from_file_location("bench_drafter", SCRIPT)
bench = importlib.util.module_from_spec(spec)
sys.modules["bench_drafter"] = bench
spec.loader.exec_module(bench)


@pytest.fixture(scope="module")
def rows():
    """Two problems of the shipped rollouts, three epochs each."""
    with gzip.open(bench.TRACES, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [row for row in rows if row["problem_id"] in (3, 20)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the benchmark on rows, or on the text of a file, and return its figures."""

    def run(content, *options):
        traces, figures = tmp_path / "traces.jsonl", tmp_path / "figures.json"
        traces.write_text(content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content))
        command = [str(SCRIPT), "--traces", str(traces), "--json", str(figures), *map(str, options)]
        monkeypatch.setattr(sys, "argv", command)
        bench.main()
        return json.loads(figures.read_text())

    return run


def test_figures(rows, run, tmp_path, monkeypatch, capsys):
    # Variants that change a constant are compiled anew, which takes too long here.
    monkeypatch.setattr(bench, "ABLATION", {k: v for k, v in bench.ABLATION.items() if not any(map(str.isupper, v))})
    picture = tmp_path / "plot.png"
    options = ("--tokenizer", bench.TOKENIZER, "--problems", 1, "--rounds", 1, "--sizes", 500, 2000)
    figures = run(rows, *options, "--fit", "--ablate", "--plot", picture)
    assert set(figures) == {"speed", "acceptance", "reliability", "fit", "ablation", "growth"}
    assert all(ours > 0 for ours, _ in figures["speed"].values())
    drafted = [cost for _, cost in figures["acceptance"]["ours"]]
    assert drafted == sorted(drafted)
    assert max(tokens for tokens, _ in figures["acceptance"]["ours"]) > 1.5
    assert all(0 <= observed <= 1 for *_, observed in figures["reliability"])
    assert len(figures["fit"]) == bench._kernels.FEATURES
    assert set(figures["ablation"]) == set(bench.ABLATION)
    assert set(figures["growth"]) == {"500", "2000"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "tokens/step" in capsys.readouterr().out


def load(rows, tmp_path, history=16, replay=8):
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bench.load(bench.argparse.Namespace(traces=path, tokenizer=None, history=history, replay=replay))


def test_history_is_the_newest_of_all_earlier_steps(tmp_path):
    rows = [
        {"problem_id": 0, "policy_step": step, "sample": sample, "response": [step, sample, 7]}
        for step in (3, 1, 2)
        for sample in range(4)
    ]
    (problem,) = load(rows, tmp_path, history=6, replay=3)
    assert [t[:2].tolist() for t in problem.history] == [[1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [2, 3]]
    assert [t[:2].tolist() for t in problem.replay] == [[3, 0], [3, 1], [3, 2]]
    assert problem.newest == 4
    assert load(rows, tmp_path, history=3)[0].newest == 3


def test_a_single_step_is_divided(tmp_path):
    rows = [{"problem_id": 0, "policy_step": 1, "sample": i, "response": [i, 8, 9]} for i in range(5)]
    (problem,) = load(rows, tmp_path, history=3)
    assert [int(t[0]) for t in problem.history + problem.replay] == [0, 1, 2, 3, 4]
    assert (len(problem.history), problem.newest) == (3, 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no problem with rollouts"),
        ("not json\n", "cannot read"),
        ("1\n", "cannot read"),
        ([{"problem_id": 0, "policy_step": 1, "response": "text"}], "lacks sample"),
        ([{"problem_id": 0, "policy_step": 1, "sample": 0, "response": "alone"}], "no problem with rollouts"),
    ],
)
def test_bad_traces(run, content, says):
    with pytest.raises(SystemExit) as exit:
        run(content)
    assert says in exit.value.code
    assert exit.value.code.startswith("bench_drafter: ")
    assert "\n" not in exit.value.code


def test_missing_file(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--traces", tmp_path / "none.jsonl"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("bench_drafter: cannot read")
    assert done.stderr.count("\n") == 1
