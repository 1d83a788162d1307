"""Reading ``messages``, ``tools`` and ``tool_choice`` into what chat templates expect."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs

from strata_core.errors import InvalidRequest
from strata_core.server.body import Body, kind_of, refuse
from strata_core.tokens.template import RESERVED

ROLES = ("system", "developer", "user", "assistant", "tool")
_TAKEN = RESERVED | {"template", "tokenizer"}
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@attrs.frozen
class ChatInput:
    """What a chat template is rendered with.

    :ivar messages: one dict per message; ``content`` is a string (or None for an assistant that only calls tools),
        ``developer`` has become ``system``, and further keys of the client are kept for templates that know them.
    :ivar tools: OpenAI tool objects, None when there are none or the client forbids calls.
    :ivar variables: further template variables (``chat_template_kwargs``; ``tool_choice`` when the client gave one).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


def read_chat_input(body: Body) -> ChatInput:
    """:raises InvalidRequest: naming the message, part or tool that is malformed or not supported."""
    messages = body.required("messages")
    if not isinstance(messages, list):
        refuse("messages", "an array", messages)
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    tools, choice = read_tools(body)
    variables = dict(body.mapping("chat_template_kwargs") or {})
    taken = sorted(_TAKEN & variables.keys())
    if taken:
        raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs")
    if choice is not None:
        variables["tool_choice"] = choice
    return ChatInput([_read_message(index, message) for index, message in enumerate(messages)], tools, variables)


def _read_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        refuse(where, "an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{where}.role")
    found = {key: value for key, value in message.items() if value is not None}
    found["role"] = "system" if role == "developer" else role
    found["content"] = _read_content(f"{where}.content", message.get("content"))
    if role == "assistant":
        if message.get("tool_calls"):
            found["tool_calls"] = _read_tool_calls(f"{where}.tool_calls", message["tool_calls"])
        else:
            found.pop("tool_calls", None)
    for key in ("reasoning_content", "name", "tool_call_id"):
        if key in found and not isinstance(found[key], str):
            refuse(f"{where}.{key}", "a string", found[key])
    if found["content"] is None and not (role == "assistant" and len(found) > 2):
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    return found


def _read_content(where: str, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, "a string or an array of text parts", content)
    texts = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            refuse(at, "an object", part)
        if part.get("type") != "text":
            raise InvalidRequest(
                f"{at}: parts of type {part.get('type')!r} are not supported, only text", param=f"{at}.type"
            )
        if not isinstance(part.get("text"), str):
            refuse(f"{at}.text", "a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def _read_tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse(where, "an array", calls)
    for index, call in enumerate(calls):
        at = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{at} must be an object with function.name", param=at)
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str | dict):
            refuse(f"{at}.function.arguments", "a string of JSON", arguments)
    return calls


def read_tools(body: Body) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools that the template shall show, and ``tool_choice`` as given (None when absent).

    With ``none`` no tool is shown; a named function leaves only that one.
    """
    tools = body.array("tools") or []
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    choice = body.get("tool_choice")
    if choice is None:
        return tools or None, None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidRequest(f"tool_choice must be none, auto or required, not {choice!r}", param="tool_choice")
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
        return (None if choice == "none" else tools or None), choice
    name = _named_choice(choice)
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return chosen, choice


def _named_choice(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        described = json.dumps(choice)[:100] if isinstance(choice, dict) else kind_of(choice)
        raise InvalidRequest(
            f'tool_choice must be a word or {{"type": "function", "function": {{"name": ...}}}}, not {described}',
            param="tool_choice",
        )
    return name


def _check_tool(where: str, tool: object) -> None:
    if not isinstance(tool, dict):
        refuse(where, "an object", tool)
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise InvalidRequest(f"{where}: tools of type {kind!r} are not supported, only function", param=where)
    function = tool.get("function")
    if not isinstance(function, dict):
        refuse(f"{where}.function", "an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.function.name is not a function name: {name!r}", param=f"{where}.function.name")
    for key, types, wanted in (("parameters", dict, "an object"), ("description", str, "a string")):
        if function.get(key) is not None and not isinstance(function[key], types):
            refuse(f"{where}.function.{key}", wanted, function[key])
