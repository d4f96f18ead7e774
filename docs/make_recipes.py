# SPDX-License-Identifier: Apache-2.0
"""Write ``docs/recipes.md`` from the fields of ``RunConfig`` and the strings under them.

Run ``python docs/make_recipes.py`` after changing a field; a test says when it was forgotten.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

from fedloom import config

HEAD = """# Recipes

A recipe is a TOML file whose keys are the fields of `RunConfig`. Keys that are left out keep their
default; an unknown key, a wrong type or a value out of range is refused before anything starts, in one
line and with exit code 2. `fedloom run RECIPE --set lora.rank=16` changes a key for one run.

FedNL's paper leaves many choices open; the defaults below are ours, and each is a key so that a recipe
shows what was assumed.

## The paper's own scale

Three recipes of `simulations/` are FedNL's settings for one GPU and a model hub. A test checks their keys;
we have not run them, and no figure of ours comes from them.

| recipe | backbone | data | LoRA | learning rate |
| --- | --- | --- | --- | --- |
| `fednl-mmlu-qwen2.5-1.5b` | Qwen2.5-1.5B | MMLU, five clients | rank 32, alpha 64 | 5e-5 |
| `fednl-mmlu-llama-3.2-1b` | Llama-3.2-1B | MMLU, five clients | rank 32, alpha 64 | 5e-5 |
| `fednl-niah-llama-3.2-1b` | Llama-3.2-1B | needles in WikiText, seven clients, 1K to 16K tokens | rank 16, alpha 32 | 3e-4 |

On two cores: `fednl` (MMLU's packaged questions), `bigbench` (five clients of hundreds of questions),
`niah` (seven clients of needles), `faast` (sentences of three shops) and `faast-digits` (100 clients).

The Fed-Mamba row of its table is another backbone with LoRA and no memory; `baseline = "fed-mamba"` sets
the model, `memory.enabled = false` and `lora.targets = "in,x,out"` (`model.source = "tiny:mamba"` is
the one to try it with on a CPU):

```toml
baseline = "fed-mamba"     # hub:state-spaces/mamba-1.4b-hf
name = "fed-mamba-mmlu"
rounds = 5

[model]
dtype = "bfloat16"

[data]
source = "hub:cais/mmlu"

[lora]
rank = 32
alpha = 64.0

[train]
learning-rate = 5e-5

[clients]
gpus = 0.2
```

"""
FOOT = """
## Starting weights

Under FedNL every node begins with fresh adapters on the base model (`B = 0`, gates at `memory.gate-init`); there is no
warm-up that would show one method more data than another.
"""


def field_docs() -> dict[tuple[str, str], str]:
    """Return the string under each field, by (class, field)."""
    docs = {}
    sources = [
        path.read_text(encoding="utf-8") for path in Path(config.__file__).parent.glob("*.py")
    ]
    for node in (node for source in sources for node in ast.parse(source).body):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and is_text:
                docs[node.name, field.target.id] = " ".join(str(after.value.value).split())
    return docs


def page() -> str:
    """Return the whole page."""
    docs, parts = field_docs(), {"": "RunConfig"}
    root = config.RunConfig()
    for name, value in vars(root).items():
        if type(value).__name__.endswith("Config"):
            parts[name] = type(value).__name__
    text = HEAD
    for name, cls in parts.items():
        values = vars(getattr(root, name)) if name else vars(root)
        text += f"## {f'`[{name}]`' if name else 'The run'}\n\n{inspect.getdoc(getattr(config, cls)).splitlines()[0]}\n\n"
        values = {k: v for k, v in values.items() if not k.startswith("_")}
        text += "| key | default | |\n| --- | --- | --- |\n" if values else ""
        for field, value in values.items():
            if field not in parts:
                said = docs.get((cls, field), "").replace("``", "`").replace("|", "\\|")
                text += f"| `{field.replace('_', '-')}` | `{json.dumps(value)}` | {said} |\n"
        text += "\n"
    return text.rstrip() + "\n" + FOOT


if __name__ == "__main__":
    Path(__file__).with_name("recipes.md").write_text(page(), encoding="utf-8")
