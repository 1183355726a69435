"""The model card of an exported run."""

import json
from pathlib import Path

from depthroute.config import dump
from depthroute.data import Manifest
from depthroute.models import CausalLM
from depthroute.train import RunConfig
from depthroute.train.checkpoint import checkpoint_step, newest_checkpoint
from depthroute.train.run import RunFolder

_CARD = """---
license: {license_id}
library_name: transformers
pipeline_tag: text-generation
tags:
- depthroute
- {scheme}
---

# {name}

A causal language model of {parameters:,} parameters that reads its own depth by the residual scheme
`{scheme}`, trained with depthroute. It continues text; it was not tuned to follow instructions.

## Use

```python
from transformers import pipeline

generator = pipeline("text-generation", model="PATH", trust_remote_code=True)
print(generator("Once", max_new_tokens=50)[0]["generated_text"])
```

`trust_remote_code=True` runs the code in this folder; `import depthroute.models.hf` before loading
makes it unnecessary. Needs transformers >= 5.17, torch >= 2.11 and pydantic.

## Training

{steps:,} of {planned:,} steps, {tokens:,} tokens, {context:,} tokens of context.

| metric | value |
|---|---|
{metrics}

Data: {data}

| version | |
|---|---|
{versions}

The run's settings:

```toml
{settings}```
"""


def model_card(
    run: Path, settings: RunConfig, manifest: Manifest, model: CausalLM, *, license_id: str
) -> str:
    """Return the text of a model card: use, metrics, data, versions and settings of a run.

    Args:
        run: The run folder.
        settings: Its settings.
        manifest: What its data are.
        model: Its newest checkpoint.
        license_id: Identifier of the licence.
    """
    step = checkpoint_step(newest_checkpoint(run))
    done = [record for record in RunFolder.read(run) if record["step"] <= step]
    validations = [record for record in done if "val/loss_nats" in record]
    metrics = validations[-1] if validations else {}
    environment = json.loads((run / "environment.json").read_text())
    made_of = ", ".join(f"{key} {value}" for key, value in manifest.settings.items())
    train = manifest.counts("train")
    return _CARD.format(
        license_id=license_id,
        name=run.name,
        scheme=settings.model.residual.name,
        parameters=sum(p.numel() for p in model.parameters()),
        steps=step,
        planned=settings.train.steps,
        tokens=step * settings.train.batch_size * settings.data.context,
        context=settings.data.context,
        metrics="\n".join(f"| {key} | {value} |" for key, value in metrics.items()),
        data=f"{train.num_tokens:,} tokens in {train.num_documents:,} documents, tokenizer "
        f"{manifest.tokenizer}, made from {made_of}.",
        versions="\n".join(f"| {key} | {value} |" for key, value in environment.items()),
        settings=dump(settings),
    )
