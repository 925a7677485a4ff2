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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from environments.base import Question
from environments.registry import create
from environments.search.corpus import RELATIONS, build_world
from environments.search.env import FIRST_WARM_START_SEED
from environments.search.prompts import ANSWER_MARK, question_messages
from environments.search.questions import build_questions
from environments.search.tools import SEARCH, SearchTool
from environments.search.vocabulary import CALL_CLOSING, CALL_OPENING, PAD, STOP, UNKNOWN, build_tokenizer
from stoa.chat.render import ChatRenderer
from stoa.chat.tools import ToolCall
from trainer_gpu.rehearsal import play, rates

SHIPPED_SEED = 2
REPORT_EVERY = 50

# B rows of a batch, T tokens, V vocabulary.


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the policy is taught. The shares are of dialogues; `search_rate` is what the policy shall do."""

    num_steps: int = 600
    batch_rows: int = 64
    learning_rate: float = 4e-3
    num_warmup_steps: int = 50
    steps_per_world: int = 25
    entities_per_world: int = 600
    top_k: int = 2
    search_rate: float = 0.21
    # Most of the run shows many searches, for practice, and weights the decision to search back to search_rate.
    practice_share_of_steps: float = 0.8
    practice_search_rate: float = 0.8
    final_good_query_rate: float = 0.78


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One written example: all ids, and the weight of each id as a target (0 where the policy does not speak)."""

    ids: list[int]
    weights: list[float]


class Teacher:
    """Writes dialogues about one world."""

    def __init__(self, world_seed: int, recipe: Recipe, tokenizer: Tokenizer) -> None:
        world = build_world(FIRST_WARM_START_SEED + world_seed, recipe.entities_per_world)
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer.to_str().encode())
        self._questions = build_questions(world, 0)
        self._names = {entity.id: entity.name for entity in world}
        self._tool = SearchTool([entity.abstract for entity in world], recipe.top_k)

    def dialogue(self, draw: random.Random, practice: bool) -> Dialogue:
        """One dialogue about a random question, with or without a search."""
        recipe = self._recipe
        question = draw.choice(self._questions)
        shown_rate = recipe.practice_search_rate if practice else recipe.search_rate
        searches = draw.random() < shown_rate
        wanted, shown = (recipe.search_rate, shown_rate) if searches else (1 - recipe.search_rate, 1 - shown_rate)
        ids = list(self._renderer.prompt(question_messages(question.text)))
        weights = [0.0] * len(ids)
        answer = draw.choice(RELATIONS[_relation(question)])
        if searches:
            good = practice or draw.random() < recipe.final_good_query_rate
            query = self._names[question.source] if good else _relation(question)
            answer = question.answers[0] if good else answer
            self._say(ids, weights, f"<|tool_call_start|>{CALL_OPENING}{query}{CALL_CLOSING}<|tool_call_end|>{STOP}")
            result = self._tool.run(ToolCall(SEARCH, {"query": query}))
            follow = self._renderer.follow([result] if result else [])
            ids.extend(follow)
            weights.extend([0.0] * len(follow))
        self._say(ids, weights, f"{ANSWER_MARK} {answer}{STOP}")
        weights[weights.index(1.0)] = wanted / shown
        return Dialogue(ids, weights)

    def _say(self, ids: list[int], weights: list[float], text: str) -> None:
        said = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(said)
        weights.extend([1.0] * len(said))


def policy_config(tokenizer: Tokenizer) -> Lfm2MoeConfig:
    """The shape of the small policy: 284,512 parameters; every dimension that gets quantised is a multiple of 64."""
    return Lfm2MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_expert_bias=True,
        routed_scaling_factor=1.0,
        conv_L_cache=3,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PAD),
        bos_token_id=tokenizer.token_to_id("<|startoftext|>"),
        eos_token_id=tokenizer.token_to_id(STOP),
        dtype="float32",
    )


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


def _loss(model: Lfm2MoeForCausalLM, batch: list[Dialogue], pad_id: int) -> torch.Tensor:
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


def _relation(question: Question) -> str:
    return question.id.split("-")[1]


CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def save_policy(model: Lfm2MoeForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a hub checkpoint folder that transformers and mlx_lm open."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 1.0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": "<|startoftext|>",
        "eos_token": STOP,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
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
