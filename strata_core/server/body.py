"""Reading request bodies: typed, one function per kind of value, every refusal names its field."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import flask
from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from strata_core.errors import InvalidRequest

_BEYOND = 2**63
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json() -> dict[str, Any]:
    """The JSON object in the body of the current request, whatever its content type says.

    :raises InvalidRequest: it is not JSON, not an object, or holds text that is not Unicode.
    :raises RequestEntityTooLarge: it is larger than the application's bound.
    """
    raw = _read_bounded(flask.request)
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the request body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {kind_of(value)}")
    if _SURROGATE.search(raw):
        # JSON can spell half of a surrogate pair, which is no character and cannot be encoded.
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the request body has a lone surrogate (\\ud800 to \\udfff)") from None
    return value


def _read_bounded(request: flask.Request) -> bytes:
    """The whole body. Werkzeug refuses too large a ``Content-Length`` but cuts a chunked body off at the bound."""
    with arriving():
        raw = request.get_data(cache=False)
    check_complete(request, len(raw))
    bound = request.max_content_length
    if request.content_length is None and bound is not None and len(raw) >= bound:
        raise RequestEntityTooLarge
    return raw


@contextlib.contextmanager
def arriving() -> Iterator[None]:
    """Around reading of a body: what its connection raises becomes an :class:`InvalidRequest`."""
    try:
        yield
    except (OSError, ClientDisconnected) as error:  # werkzeug makes the second of the first where it counts bytes
        why = error.strerror if isinstance(error, OSError) else None
        raise InvalidRequest(f"the request body did not arrive: {why or 'its connection broke'}") from None


def check_complete(request: flask.Request, received: int) -> None:
    """:raises InvalidRequest: the client announced more bytes than it sent before it closed its end."""
    announced = request.content_length
    if announced is not None and received < announced:
        raise InvalidRequest(f"the request body ended after {received} of {announced} bytes")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def kind_of(value: object) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: tuple[tuple[type | tuple[type, ...], str], ...] = (
        ((int, float), "a number"),
        (str, "a string"),
        (list, "an array"),
    )
    return next((name for types, name in names if isinstance(value, types)), "an object")


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    """Raise the error for a value of the wrong kind."""
    raise InvalidRequest(f"{name} must be {wanted}, not {kind_of(value)}", param=name)


class Body:
    """A request body and the fields that its endpoint reads.

    A field that is null counts as absent, as it does for OpenAI. Fields that are not declared are accepted and have no
    effect; reading one is a programming error, so the declared table (which documentation is tested against) cannot
    lag behind the code.

    :param declared: names of all fields that the endpoint knows.
    """

    def __init__(self, data: Mapping[str, Any], declared: Iterable[str]):
        self._data = data
        self._declared = frozenset(declared)

    def get(self, name: str) -> Any:
        """The raw value, None when absent."""
        if name not in self._declared:
            raise KeyError(f"the endpoint does not declare the field {name!r}")
        return self._data.get(name)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise InvalidRequest(f"{name} is missing", param=name)
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(name, "true or false", value)
        return value

    def integer(self, name: str, *, low: int | None = None, high: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            refuse(name, "a whole number", value)
        _check_range(name, value, low, high)
        if not -_BEYOND < value < _BEYOND:
            # JSON has no bound; what counts with such a number fails on it, even to say it in a message.
            raise InvalidRequest(f"{name} is too large", param=name)
        return int(value)

    def number(self, name: str) -> float | None:
        """A finite number; its range is checked where it is used."""
        value = self.get(name)
        return None if value is None else as_number(name, value)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            refuse(name, "a string", value)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            refuse(name, "an object", value)
        return value

    def array(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            refuse(name, "an array", value)
        return value

    def one_of(self, *names: str) -> str:
        """The one of several names of the same thing that is given; the first when none is.

        :raises InvalidRequest: two are given with different values.
        """
        given = [name for name in names if self.get(name) is not None]
        if len({json.dumps(self.get(name), sort_keys=True) for name in given}) > 1:
            raise InvalidRequest(f"{' and '.join(given)} mean the same and have different values", param=given[0])
        return given[0] if given else names[0]


def as_number(name: str, value: object) -> float:
    """``value`` as a finite float.

    :raises InvalidRequest: it is no number, or too large for one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} is too large", param=name)
    return number


def _check_range(name: str, value: int, low: int | None, high: int | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"between {low} and {high}" if high is not None and low is not None else f"at least {low}"
        shown = value if -_BEYOND < value < _BEYOND else "a number far beyond"
        raise InvalidRequest(f"{name} must be {bounds}, not {shown}", param=name)
