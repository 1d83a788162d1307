"""Made-up traces: N agents taking turns."""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs
import numpy as np

from strata_core.conversations.options import KeeperOptions
from strata_core.engine.requests import RequestRecord
from strata_core.engine.trace import TracedRequest, TraceWriter
from strata_core.errors import SettingsError
from strata_core.settings.core import BatchAgenda


@attrs.frozen(kw_only=True)
class Agents:
    """Agents that share a system prompt, and each of which sends ``rounds`` turns of one conversation.

    :ivar system: tokens of the system prompt; :ivar first: of an agent's first message; :ivar grow: of each later one;
        :ivar reply: generated in each turn.
    :ivar spread: by how much an agent's first message may be longer or shorter than ``first``, as a share of it.
    :ivar gap_s: from the end of a reply to the agent's next message; :ivar stagger_s: between the agents' beginnings.
    :ivar token_bytes: bytes of K/V per token.
    """

    agents: int = 4
    rounds: int = 5
    system: int = 1000
    first: int = 4000
    grow: int = 300
    reply: int = 200
    spread: float = 0.0
    gap_s: float = 30.0
    stagger_s: float = 5.0
    token_bytes: int = 24576
    page_tokens: int = 32
    parallel: int = 4
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        least = {"agents": 1, "rounds": 1, "first": 1, "grow": 1, "reply": 1, "system": 0, "token_bytes": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise SettingsError(f"{name} must be at least {value}, not {getattr(self, name)}", param=name)
        if not 0 <= self.spread < 1:
            raise SettingsError(f"spread must be at least 0 and less than 1, not {self.spread}", param="spread")

    def longest(self) -> int:
        """Tokens of the longest conversation in the end, at most."""
        first = round(self.first * (1 + self.spread)) + 1
        return self.system + first + self.rounds * (self.reply + self.grow)


def agents_trace(shape: Agents) -> Iterator[str]:
    """Lines of a trace of agents taking turns, the same for the same ``shape``."""
    random_ids = np.random.default_rng(shape.seed)
    writer = TraceWriter(_header(shape), random.Random(shape.seed).randbytes(32))
    yield writer.header()
    system = _ids(random_ids, shape.system)
    agents = [_Agent(shape, number, system, random_ids) for number in range(shape.agents)]
    for turn in range(shape.rounds):
        for agent in agents:
            yield writer.line(agent.turn(turn))


class _Agent:
    def __init__(self, shape: Agents, number: int, system: np.ndarray, ids: np.random.Generator):
        self._shape = shape
        self._number = number
        self._ids = ids
        self._history = system
        self._turns = [0] if len(system) else []
        # Spread evenly, not at random: the sum is then the same for every seed.
        place = 2 * number / (shape.agents - 1) - 1 if shape.agents > 1 else 0.0
        self._first = round(shape.first * (1 + shape.spread * place))

    def turn(self, turn: int) -> TracedRequest:
        shape = self._shape
        self._say(self._first if turn == 0 else shape.grow)
        prompt = len(self._history)
        self._say(shape.reply)
        return TracedRequest(
            record=RequestRecord(
                id=f"agent{self._number}-turn{turn}",
                status="stop",
                prompt_tokens=prompt,
                cached_tokens=0,
                read_tokens=0,
                generated_tokens=shape.reply,
                reused={},
                reread=(),
                created=self._number * shape.stagger_s + turn * shape.gap_s,
                queued_s=None,
                restore_s=None,
                read_s=None,
                generate_s=None,
                slot=None,
            ),
            tokens=self._history[:-1],  # the last generated token is never computed
            computed=len(self._history) - 1,
            turns=tuple(self._turns),
        )

    def _say(self, count: int) -> None:
        self._turns.append(len(self._history))
        self._history = np.concatenate([self._history, _ids(self._ids, count)])


def _ids(random_ids: np.random.Generator, count: int) -> np.ndarray:
    return random_ids.integers(0, 1 << 16, count).astype(np.int32)


def _header(shape: Agents) -> dict[str, object]:
    longest = -(-shape.longest() // shape.page_tokens) * shape.page_tokens
    return {
        "start": 0.0,
        "generated": attrs.asdict(shape),
        "page_tokens": shape.page_tokens,
        "page_bytes": shape.page_tokens * shape.token_bytes,
        "parallel": shape.parallel,
        "max_context": longest,
        "agenda": attrs.asdict(BatchAgenda()),
        "available": None,
        "levels": [],
        "options": attrs.asdict(KeeperOptions()),
    }
