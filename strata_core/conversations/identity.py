"""What makes stored K/V interchangeable: the identity digest, and the chained addresses of pages.

Two engines may exchange pages exactly if their identities are equal. The parts are kept beside the digest so that a
refusal can say what differs. Nothing in it depends on the process, the host, a path or a served name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs
import numpy as np
from blake3 import blake3

#: Part of every identity; raised when the bytes of a page change their meaning.
FORMAT_VERSION = 1

DIGEST_BYTES = 16


@attrs.frozen
class Identity:
    """``digest`` is 16 bytes over all ``parts``; parts map a name (``weights``, ``kv``, ``rope`` ...) to its value."""

    digest: bytes
    parts: Mapping[str, str] = attrs.field(eq=False)

    @classmethod
    def of(cls, parts: Mapping[str, object]) -> Identity:
        texts = {name: _text(value) for name, value in sorted(parts.items())} | {"format": str(FORMAT_VERSION)}
        canonical = json.dumps(texts, sort_keys=True, ensure_ascii=True).encode()
        return cls(blake3(canonical).digest(length=DIGEST_BYTES), texts)

    def for_tenant(self, tenant: str) -> Identity:
        """The identity under which one tenant's conversations are kept; the empty tenant's is the plain one."""
        return self if not tenant else Identity.of(dict(self.parts) | {"tenant": tenant})

    def differing(self, other: Mapping[str, str]) -> list[str]:
        """Names of the parts in which another identity differs."""
        return sorted(n for n in self.parts.keys() | other.keys() if self.parts.get(n) != other.get(n))


def page_addresses(identity: Identity, tokens: np.ndarray, page_tokens: int) -> tuple[bytes, ...]:
    """Addresses of the complete pages of a sequence: 16 bytes each.

    ``address[k] = blake3(address[k - 1] + ids of page k)``, where the identity's digest stands before the first, so an
    address names everything from position 0 through the page's end.
    """
    return extend_addresses(identity, (), tokens, page_tokens)


def extend_addresses(
    identity: Identity, known: tuple[bytes, ...], tokens: np.ndarray, page_tokens: int
) -> tuple[bytes, ...]:
    """The addresses of ``tokens`` when those of its first ``len(known)`` pages are known."""
    data = np.ascontiguousarray(tokens, "<i4")
    parent = known[-1] if known else identity.digest
    result = list(known)
    for page in range(len(known), len(data) // page_tokens):
        ids = data[page * page_tokens : (page + 1) * page_tokens]
        parent = blake3(parent + ids.tobytes()).digest(length=DIGEST_BYTES)
        result.append(parent)
    return tuple(result)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value.hex()  # exact, whatever the locale and the number of digits
    if isinstance(value, Mapping):
        return json.dumps({str(k): _text(v) for k, v in value.items()}, sort_keys=True)
    return str(value)
