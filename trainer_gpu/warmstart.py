"""Makes the small policy that a demo run starts from: `python -m trainer_gpu.warmstart --out DIR`.

A short supervised run on invented dialogues of the search task teaches the format and copying from a search result,
but leaves the policy searching only about one time in five. Worlds are fresh every few steps and never a run's own, so
no fact is learned. One seed and one thread give the same policy again.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from environments.demonstrations import Demonstration
from environments.known import create
from environments.search.small_policy import shape, write_tokenizer
from environments.search.teacher import Recipe, Teacher
from environments.search.vocabulary import PAD, build_tokenizer
from trainer_gpu.rehearsal import play, rates

SHIPPED_SEED = 2
REPORT_EVERY = 50

# B rows of a batch, T tokens, V vocabulary.


def policy_config(tokenizer: Tokenizer) -> Lfm2MoeConfig:
    """The small policy's shape as transformers takes it."""
    return Lfm2MoeConfig(**shape(tokenizer))  # pyright: ignore[reportArgumentType] - settings by name


def new_policy(tokenizer: Tokenizer, seed: int) -> Lfm2MoeForCausalLM:
    """A random policy in fp32."""
    torch.manual_seed(seed)
    config = policy_config(tokenizer)
    model = Lfm2MoeForCausalLM(config)
    # The library zeroes the pad row; the norm's gradient at zero is huge, so the row is drawn like any other.
    with torch.no_grad():
        model.model.embed_tokens.weight[config.pad_token_id].normal_(0.0, config.initializer_range)
    return model


def teach(model: Lfm2MoeForCausalLM, tokenizer: Tokenizer, recipe: Recipe, seed: int) -> Iterator[float]:
    """Run the recipe on `model` in place, yielding each step's loss (weighted mean over target tokens, nats)."""
    draw = random.Random(f"warm start {seed}")
    pad_id = tokenizer.encode(PAD).ids[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    teacher = Teacher(seed * 10_000, recipe, tokenizer)
    for step in range(recipe.num_steps):
        if step % recipe.steps_per_world == 0:
            teacher = Teacher(seed * 10_000 + step // recipe.steps_per_world, recipe, tokenizer)
        practice = step < recipe.practice_share_of_steps * recipe.num_steps
        batch = [teacher.dialogue(draw, practice) for _ in range(recipe.batch_rows)]
        loss = _loss(model, batch, pad_id)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate_share(step, recipe)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def _loss(model: Lfm2MoeForCausalLM, batch: list[Demonstration], pad_id: int) -> torch.Tensor:
    length = max(len(dialogue.ids) for dialogue in batch)
    ids_BT = torch.tensor([d.ids + [pad_id] * (length - len(d.ids)) for d in batch])
    weights_BT = torch.tensor([d.weights + [0.0] * (length - len(d.ids)) for d in batch])
    logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
    losses_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
    return (losses_BT * weights_BT[:, 1:]).sum() / weights_BT[:, 1:].sum()


def _rate_share(step: int, recipe: Recipe) -> float:
    if step < recipe.num_warmup_steps:
        return (step + 1) / recipe.num_warmup_steps
    progress = (step - recipe.num_warmup_steps) / max(1, recipe.num_steps - recipe.num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def save_policy(model: Lfm2MoeForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a hub checkpoint folder that transformers and mlx_lm open."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 1.0
    model.save_pretrained(folder)
    write_tokenizer(tokenizer, folder)
    (folder / "model.safetensors").chmod(0o644)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m trainer_gpu.warmstart", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--steps", type=int, default=Recipe().num_steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=SHIPPED_SEED, help="seed of weights, worlds and dialogues")
    parser.add_argument("--questions", type=int, default=1200, help="held-out questions to measure on")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = new_policy(tokenizer, asked.seed)
    recipe = replace(Recipe(), num_steps=asked.steps)
    for step, loss in enumerate(teach(model, tokenizer, recipe, asked.seed), start=1):
        if step % REPORT_EVERY == 0 or step == asked.steps:
            sys.stderr.write(f"step {step}/{asked.steps} loss {loss:.4f}\n")
    save_policy(model, tokenizer, asked.out)
    environment = create("search", {}, tokenizer.to_str().encode())
    question_ids = environment.question_ids("held_out")[: asked.questions]
    measured = rates(play(model, environment, question_ids, asked.seed))
    sys.stdout.write(json.dumps({"seed": asked.seed, "steps": asked.steps, **asdict(measured)}) + "\n")


if __name__ == "__main__":
    main()
