"""Entry point of group ``vllm.general_plugins``: vLLM calls it in every process of an engine."""


def register() -> None:
    """Apply the fixes that this build of vLLM needs."""
    from das_verl.vllm.fixes import fix_expansion

    fix_expansion()
