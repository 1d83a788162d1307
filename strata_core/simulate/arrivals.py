"""When the requests of a trace arrive in a replay that is faster or slower than what was recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

from strata_core.simulate.trace import Item


class Arrivals:
    """Schedules requests.

    * ``think``: a request that goes on from a reply comes as long after that reply as it did; others, at their time.
      So clients with a conversation each wait for their answers, and not for each other.
    * ``order``: a request comes after all that had ended when it came. So one client's requests stay in order, whatever
      they are about.
    * ``recorded``: all at the recorded times.

    :param items: in order of arrival.
    :param arrive: schedules a request for a time.
    """

    def __init__(self, items: Sequence[Item], mode: str, arrive: Callable[[Item, float], None]):
        self._arrive = arrive
        self._followers: dict[str, list[Item]] = defaultdict(list)
        # With their places in order of arrival, so that one that took no time does not wait for itself.
        ends = sorted((item.ended, place) for place, item in enumerate(items)) if mode == "order" else []
        self._by_end = [items[place] for _, place in ends]
        self._ended: set[str] = set()
        self._done = 0  # of those by end, how many have ended now with all before them
        self._held: dict[int, list[Item]] = defaultdict(list)  # by how many must have ended
        ids = {item.id for item in items}
        for place, item in enumerate(items):
            before = bisect_left(ends, (item.arrived, place))
            if before:
                self._held[before].append(item)
            elif mode == "think" and item.follows in ids:
                self._followers[item.follows or ""].append(item)
            else:
                arrive(item, item.arrived)

    def ended(self, item: Item, now: float) -> None:
        """A request has ended: let come what waited for it."""
        for follower in self._followers.pop(item.id, ()):
            self._arrive(follower, now + max(0.0, follower.arrived - item.ended))
        self._ended.add(item.id)
        while self._done < len(self._by_end) and self._by_end[self._done].id in self._ended:
            self._done += 1
            for held in self._held.pop(self._done, ()):
                self._arrive(held, now + held.arrived - self._by_end[self._done - 1].ended)
