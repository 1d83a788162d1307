"""The environment in which chat templates run.

A template is a program that came with a model file. It runs in Jinja's immutable sandbox (no attribute of Python's
machinery, nothing that changes what was passed in) and on a budget: so many passes of loops and calls of macros, and
results of operators and a rendering of so many characters. What single filters and methods make (``center``) is not
bounded. It sees what ``transformers`` gives templates: ``raise_exception``, ``strftime_now``, ``tojson``, ``break`` and
``continue``, and the ``generation`` tag.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

#: Passes of loops and calls of macros in one rendering: 10,000 messages with 100 each. Counting one costs 0.2 us.
MAX_STEPS = 1_000_000
#: Characters of a rendering, and of the result of one operator.
MAX_TEXT = 64 * 1024 * 1024

#: A field of a % format whose width is computed or has five digits or more.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
_STEP = "__step__"


class TemplateRefusal(TemplateError):
    """What a template's own ``raise_exception(message)`` raises."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. One serves all templates and threads; the budget is counted for each thread's rendering."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag])
        self._local = threading.local()
        self.filters["tojson"] = self._tojson
        self.filters[_STEP] = self._step
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def begin(self, escape_json: Callable[[str], str] | None) -> None:
        """Start a rendering of this thread with a full budget.

        :param escape_json: applied to what ``tojson`` gives; stand-ins for texts that JSON escapes need it.
        """
        self._local.steps = 0
        self._local.escape_json = escape_json

    @pass_context  # so that the optimiser does not take its result for a constant
    def _step(self, context: Context, value: object) -> object:
        """Count a pass of a loop or a call of a macro; a filter, because the sandbox checks every call of a function.

        :raises SecurityError: the budget is used up.
        """
        self._local.steps += 1
        if self._local.steps > MAX_STEPS:
            raise SecurityError(f"the template made more than {MAX_STEPS:,} passes of its loops")
        return value

    def join(self, *parts: object) -> str:
        """``a ~ b``, bounded."""
        text = "".join(map(str, parts))
        self.check_size(len(text))
        return text

    def check_size(self, length: int) -> None:
        """:raises SecurityError: a text is longer than any prompt."""
        if length > MAX_TEXT:
            raise SecurityError(f"the template made a text of more than {MAX_TEXT:,} characters")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make much of little are refused before they do."""
        sizes = [len(x) if isinstance(x, (str, list, tuple)) else None for x in (left, right)]
        if operator == "*" and sizes != [None, None]:
            count = right if sizes[0] is not None else left
            self.check_size((sizes[0] or sizes[1] or 0) * (count if isinstance(count, int) else 1))
        elif operator == "+":
            self.check_size((sizes[0] or 0) + (sizes[1] or 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.check_size(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
            raise SecurityError(f"the template formats with a field that is too wide: {left!r}")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        return tree

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As ``transformers`` has it: no HTML escapes, letters as they are."""
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        escape = self._local.escape_json
        return escape(text) if escape else text


class _Metering(NodeTransformer):
    """Counts in every loop and macro, and puts ``join`` in the place of ``~``."""

    def _metered(self, node: Any) -> Any:
        self.generic_visit(node)
        count = nodes.Filter(nodes.Const(None), _STEP, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _metered

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks replies for training; for serving only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - a set is what the base class declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
