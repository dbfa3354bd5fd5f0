"""The whole idea in one file: a question, an agent that looks into a database, a reward, and one GRPO step at a time.

    python examples/minimal.py        # under a minute on a CPU; no GPU, weights, network or server

Read it from top to bottom. A model of one million parameters first copies a teacher that looks a stored value up in
half of its demonstrations and guesses it in the other half. A guess is wrong, for the database stores "red" as "RD".
GRPO then raises the share of episodes that look first, because those are paid. `sqltrain run miniature` does the same
on thousands of questions, with databases and questions that were never trained on.

Letters in shapes: G episodes of the question (the group), T tokens of an episode.
"""

import random
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pipelines.core.types import Database, Example
from pipelines.environment.core import Environment
from pipelines.recipe.config import Model
from pipelines.rollout.codec import ChatCodec
from pipelines.training.advantages import estimate_advantages
from pipelines.training.losses import TrackBatch, dapo, ratios
from pipelines.training.model import load_to_train, make_tiny

GROUP = 12  # G: episodes that are compared with one another
DEMONSTRATIONS, SFT_STEPS, SFT_RATE = 4, 40, 3e-3
GRPO_STEPS, GRPO_RATE = 5, 5e-4
TURN_TOKENS = 40
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # epsilon of the clipped ratio (SQL-Trail, equation 2)


# 1. A question. Its gold SQL needs a value that the question does not spell as the database does.


def make_question(folder: Path) -> Example:
    """A shop with six items, and a question about those that are red."""
    path = folder / "shop.sqlite"
    with sqlite3.connect(path) as shop:
        shop.execute("CREATE TABLE item (name TEXT, colour TEXT)")
        items = [("pen", "RD"), ("cup", "BL"), ("bag", "RD"), ("hat", "GR"), ("box", "RD"), ("lamp", "BL")]
        shop.executemany("INSERT INTO item VALUES (?, ?)", items)
    shop.close()
    return Example(
        id="red-items",
        question="How many items are red?",
        database=Database("shop", "sqlite", str(path)),
        gold_sql="SELECT count(*) FROM item WHERE colour = 'RD'",
    )


# 2. A teacher: turns as the protocol `react` wants them. Half of the time it looks first, else it guesses.

THINK = "<reasoning>{}</reasoning>"
LOOK = THINK.format("Which colours are stored?") + "<sql>SELECT DISTINCT colour FROM item</sql>"
RIGHT = THINK.format("Red is RD.") + "<solution>SELECT count(*) FROM item WHERE colour = 'RD'</solution>"
WRONG = THINK.format("Red is red.") + "<solution>SELECT count(*) FROM item WHERE colour = 'red'</solution>"


# 3. An episode: prompt, turn, observation, turn ... as token ids. The mask marks the agent's own tokens, which alone
#    are trained; the environment runs the SQL in a read-only sandbox and pays at the end.


@dataclass
class Episode:
    """Token ids of one attempt, and what it was paid."""

    ids: list[int]  # (T,)
    mask: list[int] = field(default_factory=list)  # (T,) 1: the agent said it; 0: prompt or observation
    reward: float = 0.0
    correct: bool = False
    turns: int = 0


def play(environment: Environment, question: Example, codec: ChatCodec, turn_of) -> Episode:
    """Play one episode; `turn_of(ids)` gives the ids of the agent's next turn."""
    session = environment.reset(question)
    prompt = codec.prompt([(message["role"], message["content"]) for message in session.messages])
    episode = Episode(list(prompt), [0] * len(prompt))
    while not session.done:
        said = turn_of(episode.ids)
        episode.ids += said
        episode.mask += [1] * len(said)
        episode.turns += 1
        step = session.step(codec.decode(said))
        if not step.done:
            observation = codec.observation(step.observation, said[-1] if said else None)
            episode.ids += observation
            episode.mask += [0] * len(observation)
    episode.reward, episode.correct = step.reward or 0.0, bool(step.info["correct"])
    return episode


# 4. The policy: one token after the other, until a tag that ends a turn. Sampled at temperature 1, so that the loss
#    takes the probability of just those draws.


@torch.no_grad()
def sample_turn(model, codec: ChatCodec, ids: list[int], ends: set[int]) -> list[int]:
    """The ids of the agent's next turn."""
    cache, said, new = None, [], torch.tensor([ids])
    while len(said) < TURN_TOKENS:
        output = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = int(torch.multinomial(output.logits[0, -1].softmax(-1), 1))
        said.append(token)
        if token in ends:
            break
        new = torch.tensor([[token]])
    return said


def log_probabilities(model, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """(G, T - 1) log-probabilities of each next token, and the mask of those that the agent said."""
    longest = max(len(episode.ids) for episode in episodes)
    ids = torch.tensor([episode.ids + [0] * (longest - len(episode.ids)) for episode in episodes])  # (G, T)
    mask = torch.tensor([episode.mask + [0] * (longest - len(episode.mask)) for episode in episodes])  # (G, T)
    logits = model(input_ids=ids).logits[:, :-1]  # (G, T - 1, vocabulary); causal: padding behind changes nothing
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1), mask[:, 1:].float()


# 5. Supervised fine-tuning: the cross-entropy of the teacher's tokens, and of no others.


def sft_step(model, optimizer, demonstrations: list[Episode]) -> float:
    """One step on all demonstrations; returns the loss in nats a token."""
    logps, mask = log_probabilities(model, demonstrations)
    loss = -(logps * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# 6. GRPO: an episode is worth what it is paid above its group's mean, in the group's standard deviations (DeepSeekMath,
#    4.1); every token of the agent is moved by that much, its ratio to the sampling policy clipped.


def grpo_step(model, optimizer, episodes: list[Episode]) -> Tensor:
    """One step on one group; returns the (G,) advantages."""
    rewards = torch.tensor([episode.reward for episode in episodes])  # (G,)
    advantages = estimate_advantages(rewards, GROUP)  # (G,) (r - mean) / (deviation + eps); 0 if all are paid alike
    logps, mask = log_probabilities(model, episodes)
    old = logps.detach()  # on-policy: the episodes were sampled with these very weights
    ratio = ratios(logps, old, mask, "token")
    track = TrackBatch(
        logps=logps,
        ratio=ratio,
        advantages=advantages[:, None],
        mask=mask,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        generation_tokens=mask.sum(),
        longest_episode=logps.size(1),
    )
    loss = dapo(track)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return advantages


# 7. All of it, with figures.


def main() -> tuple[float, float]:
    """Train and print; returns the share of right episodes after SFT and after GRPO."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # the model is so small that threads cost more than they bring
    with tempfile.TemporaryDirectory() as name, Environment("miniature") as environment:
        question = make_question(Path(name))
        protocol = environment.protocol
        texts = [message["content"] for message in environment.reset(question).messages]
        make_tiny(Model(), [*texts, LOOK, RIGHT, WRONG] * 4, protocol.tags, Path(name) / "model", seed=0)
        model, tokenizer = load_to_train(Path(name) / "model", Model())
        codec = ChatCodec(tokenizer)
        ends = {*(codec.agent(stop)[-1] for stop in environment.reset(question).stop), tokenizer.eos_token_id}

        demonstrations = []
        for number in range(DEMONSTRATIONS):
            turns = iter([LOOK, RIGHT] if number % 2 else [WRONG])
            demonstrations.append(play(environment, question, codec, lambda ids, turns=turns: codec.agent(next(turns))))
        right = sum(episode.correct for episode in demonstrations)
        print(f"demonstrations: {right} of {len(demonstrations)} are right; each that guesses is wrong")

        optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_RATE, weight_decay=0.0)
        for step in range(1, SFT_STEPS + 1):
            loss = sft_step(model, optimizer, demonstrations)
            if step % 10 == 0:
                print(f"SFT step {step:2}: loss {loss:.3f} nats a token")

        optimizer = torch.optim.AdamW(model.parameters(), lr=GRPO_RATE, weight_decay=0.0)
        shares = []
        for step in range(GRPO_STEPS + 1):
            model.eval()
            group = [
                play(environment, question, codec, lambda ids: sample_turn(model, codec, ids, ends))
                for _ in range(GROUP)
            ]
            model.train()
            shares.append(sum(episode.correct for episode in group) / GROUP)
            reward, turns = (sum(getattr(each, key) for each in group) / GROUP for key in ("reward", "turns"))
            line = f"GRPO step {step}: {shares[-1]:4.0%} right, reward {reward:5.2f}, {turns:.2f} turns"
            if step < GRPO_STEPS:
                advantages = grpo_step(model, optimizer, group)
                line += f", advantages {advantages.min():+.2f} to {advantages.max():+.2f}"
            print(line)
    return shares[0], shares[-1]


if __name__ == "__main__":
    main()
