"""Chat templates: messages to the text of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from strata_core.errors import InvalidRequest, ModelFileError, SettingsError, TemplateError
from strata_core.tokens.sandbox import TemplateEnvironment, TemplateRefusal
from strata_core.tokens.tokenizer import Tokenizer

KEY = "tokenizer.chat_template"
NO_TEMPLATE = "no chat template; pass --chat-template-file"

#: Names that a rendering sets itself; a caller's template arguments may not.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})

Message = Mapping[str, Any]


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """A model's chat template, compiled when it is first needed.

    A template that is broken does not stop the server: making the object never fails, :attr:`error` says what is wrong
    and :meth:`render` raises it, while completions without a template go on.

    :param source: the Jinja2 source.
    :param bos_token: text of the begin token, empty when the model has none; :param eos_token: of the end token.
    :param with_tools: source of the template to use instead when a request has tools; models may have two.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, with_tools: str | None = None):
        self.source = source
        self.with_tools = with_tools
        self._special = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], tokenizer: Tokenizer, override_path: str | Path | None = None
    ) -> ChatTemplate | None:
        """The template of a GGUF file, or that of a file named instead; None when there is neither.

        :param override_path: what the user named; it replaces the model's.
        :raises SettingsError: that file cannot be read.
        :raises ModelFileError: the metadata hold something else than a text.
        """
        with_tools = None
        if override_path is not None:
            try:
                source = Path(override_path).expanduser().read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(
                    f"the chat template file {override_path} cannot be read: {error}", param="chat_template_file"
                ) from error
        else:
            found, with_tools = _source(metadata, KEY), _source(metadata, KEY + ".tool_use")
            if found is None:
                return None
            source = found

        def text(token: int | None) -> str:
            return "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")

        return cls(source, bos_token=text(tokenizer.bos_id), eos_token=text(tokenizer.eos_id), with_tools=with_tools)

    @property
    def error(self) -> TemplateError | None:
        """Why this template cannot be used, or None. Compiles it."""
        try:
            self._compiled(False)
            self._compiled(True)
        except TemplateError as error:
            return error
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The text of a conversation.

        :param add_generation_prompt: end with the opening of the assistant's turn.
        :param template_kwargs: further variables that the template may ask for, such as ``enable_thinking``.
        :raises TemplateError: a syntax error, the template's own ``raise_exception``, or a failure on these messages;
            the message has the template's words.
        :raises InvalidRequest: a template argument has a name that the rendering itself sets.
        """
        return self.render_variables(
            self.variables(messages, tools, add_generation_prompt, documents, template_kwargs), None
        )

    def variables(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        documents: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What a caller gives a rendering, by the name that the template knows it by.

        :raises InvalidRequest: as :meth:`render`.
        """
        taken = sorted(RESERVED & template_kwargs.keys())
        if taken:
            names = ", ".join(taken)
            raise InvalidRequest(f"template arguments may not be named {names}", param="chat_template_kwargs")
        given = {"messages": messages, "tools": tools or None, "documents": documents or None}
        return {**template_kwargs, **given, "add_generation_prompt": add_generation_prompt}

    def render_variables(self, variables: Mapping[str, Any], escape_json: Callable[[str], str] | None) -> str:
        """Render with what :meth:`variables` gave.

        :param escape_json: see :meth:`TemplateEnvironment.begin`.
        :raises TemplateError: as :meth:`render`.
        """
        template = self._compiled(variables.get("tools") is not None)
        environment = _environment()
        environment.begin(escape_json)
        parts, length = [], 0
        try:
            for part in template.generate(**self._special, **variables):
                length += len(part)
                environment.check_size(length)
                parts.append(part)
        except TemplateRefusal as error:
            raise TemplateError(str(error)) from error
        except RecursionError as error:
            raise TemplateError("the chat template failed: it calls itself without end") from error
        except Exception as error:  # a template is a program: whatever it raises is its failure
            raise TemplateError(f"the chat template failed: {str(error) or type(error).__name__}") from error
        return "".join(parts)

    def _compiled(self, tools: bool) -> jinja2.Template:
        return _compile(self.with_tools if tools and self.with_tools is not None else self.source)


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError, TypeError) as error:
        raise TemplateError(f"the chat template cannot be compiled: {error}") from error


def _source(metadata: Mapping[str, object], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelFileError(f"{key} is not a text", param=key)
    return value or None
