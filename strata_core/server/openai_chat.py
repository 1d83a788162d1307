"""``POST /v1/chat/completions`` and its ``/render``: conversations through the model's chat template."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import flask

from strata_core.conversations.tokens import common_prefix
from strata_core.errors import InvalidRequest, TemplateError
from strata_core.server import common, fields, generation
from strata_core.server.body import Body, read_json
from strata_core.server.chat_reply import ChatReply
from strata_core.server.messages import ChatInput, read_chat_input
from strata_core.settings import Settings
from strata_core.tokens import RenderedPrompt, ReplyParser, parser_for, render_tokens

if TYPE_CHECKING:
    from strata_core.engine.engine import Engine

blueprint = flask.Blueprint("openai_chat", __name__)


@blueprint.post("/v1/chat/completions")
def chat_completions() -> flask.Response:
    """Continue a conversation."""
    arrived = time.monotonic()
    here = common.parts()
    engine = here.holder.accepting()
    data = read_json()
    fields.refuse_unsupported(data)
    body = Body(data, fields.CHAT)
    options = fields.read_options(
        body,
        here.settings,
        max_tokens=body.one_of("max_completion_tokens", "max_tokens"),
        logprobs=_read_logprobs(body),
    )
    common.check_model(engine, options.model)
    one_call = not body.boolean("parallel_tool_calls", True)
    chat = read_chat_input(body)
    prompt = _render(engine, chat)
    parsers = [_parser(engine, here.settings, chat, prompt) for _ in range(options.n)]
    visible = parsers[0].marker_ids(engine.tokenizer)
    running = generation.submit(engine, [prompt.tokens], options, visible, _prefix(engine, body, chat, prompt))
    reply = ChatReply(engine.name, running, options, parsers, one_call=one_call)
    return generation.reply(engine, running, reply, options, arrived)


@blueprint.post("/v1/chat/completions/render")
def render() -> flask.Response:
    """The prompt that a conversation becomes, as tokens and text, without running it."""
    engine = common.engine()
    body = Body(read_json(), fields.RENDER)
    common.check_model(engine, body.text("model"))
    prompt = _render(engine, read_chat_input(body))
    return flask.jsonify({"tokens": prompt.tokens.tolist(), "text": prompt.text, "count": len(prompt.tokens)})


def _render(engine: Engine, chat: ChatInput) -> RenderedPrompt:
    prompt = render_tokens(engine.template, engine.tokenizer, chat.messages, tools=chat.tools, **chat.variables)
    if not len(prompt.tokens):
        raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
    return prompt


def _prefix(engine: Engine, body: Body, chat: ChatInput, prompt: RenderedPrompt) -> int:
    """How many tokens of the prompt the first ``strata_prefix`` messages are; 0 where it is not given."""
    count = body.integer("strata_prefix", low=1, high=len(chat.messages))
    if count is None:
        return 0
    variables = chat.variables | {"add_generation_prompt": False}
    try:
        shared = render_tokens(
            engine.template, engine.tokenizer, chat.messages[:count], tools=chat.tools, **variables
        )
    except TemplateError as error:  # many refuse a conversation without a user, which the whole one has
        why = f"the chat template does not render the first {count} messages alone: {error.message}"
        raise InvalidRequest(why, param="strata_prefix") from error
    return common_prefix(shared.tokens, prompt.tokens)


def _parser(engine: Engine, settings: Settings, chat: ChatInput, prompt: RenderedPrompt) -> ReplyParser:
    """What reads one reply: tool calls only if the request has tools, thinking only if the template has it."""
    names = [tool["function"]["name"] for tool in chat.tools or () if settings.tool_parser != "off"]
    template = engine.template
    source = None
    if template is not None:
        source = (template.with_tools if chat.tools else None) or template.source
    return parser_for(source, prompt_text=prompt.text, tool_names=names, reasoning=settings.reasoning_parser != "off")


def _read_logprobs(body: Body) -> int | None:
    """How many alternatives to report with each token, None for no log probabilities."""
    wanted = body.boolean("logprobs")
    top = body.integer("top_logprobs", low=0, high=fields.MOST_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if wanted else None
