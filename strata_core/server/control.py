"""What the server is doing and keeps: slots, requests, conversations, plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import flask

from strata_core.errors import NotFound
from strata_core.server import common
from strata_core.server.replies import record_object

if TYPE_CHECKING:
    from strata_core.engine.stats import ConversationInfo, SlotInfo

blueprint = flask.Blueprint("control", __name__)

_PREFIXES = ("chatcmpl-", "cmpl-")


@blueprint.get("/slots")
def slots() -> flask.Response:
    """Every slot: idle, reading or generating, and how far it is. What it is about is shown to its owner only."""
    mine = common.tenant()
    return flask.jsonify([_shown_slot(slot, slot.tenant == mine) for slot in common.engine().slots()])


def _shown_slot(slot: SlotInfo, own: bool) -> dict[str, Any]:
    shown = attrs.asdict(slot, filter=lambda field, _: field.name != "tenant")
    return shown if own else shown | {"request_id": None, "conversation": None}


@blueprint.get("/v1/requests/<request_id>")
def show_request(request_id: str) -> flask.Response:
    """The why-ledger of a request, by the id of its reply or of one of its choices."""
    for prefix in _PREFIXES:
        request_id = request_id.removeprefix(prefix)
    record = common.engine().record(request_id)
    if record.tenant != common.tenant():
        # The same words as for an unknown id: that it exists is another tenant's business.
        raise NotFound(f"request {request_id!r} is not known (any more)", param="id")
    return flask.jsonify(record_object(record))


def _shown(conversation: ConversationInfo) -> dict[str, Any]:
    return attrs.asdict(conversation, filter=lambda field, _: field.name != "tenant")


def _own_conversations() -> list[ConversationInfo]:
    mine = common.tenant()
    return [item for item in common.engine().conversations() if item.tenant == mine]


def _find(conversation_id: str) -> list[ConversationInfo]:
    """Every kept copy of a conversation of this tenant, the most recently used first."""
    found = [item for item in _own_conversations() if item.id == conversation_id]
    if not found:
        raise NotFound(f"conversation {conversation_id!r} is not kept (any more)", param="id")
    return found


@blueprint.get("/v1/conversations")
def list_conversations() -> flask.Response:
    """The conversations that are kept, in slots and on all levels; every copy of one is an entry."""
    return flask.jsonify({"object": "list", "data": [_shown(item) for item in _own_conversations()]})


@blueprint.get("/v1/conversations/<conversation_id>")
def show_conversation(conversation_id: str) -> flask.Response:
    """One conversation and where its copies are."""
    return flask.jsonify({"id": conversation_id, "copies": [_shown(item) for item in _find(conversation_id)]})


@blueprint.post("/v1/conversations/<conversation_id>/pin")
def pin(conversation_id: str) -> flask.Response:
    """Never evict it until it is unpinned."""
    _find(conversation_id)
    common.engine().pin_conversation(conversation_id, True, common.tenant())
    return flask.jsonify({"id": conversation_id, "pinned": True})


@blueprint.post("/v1/conversations/<conversation_id>/unpin")
def unpin(conversation_id: str) -> flask.Response:
    _find(conversation_id)
    common.engine().pin_conversation(conversation_id, False, common.tenant())
    return flask.jsonify({"id": conversation_id, "pinned": False})


@blueprint.delete("/v1/conversations/<conversation_id>")
def delete_conversation(conversation_id: str) -> flask.Response:
    """Forget it, in slots and on all levels. Refused while a request runs in it."""
    _find(conversation_id)
    common.engine().delete_conversation(conversation_id, common.tenant())
    return flask.jsonify({"id": conversation_id, "deleted": True})
