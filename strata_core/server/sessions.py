"""Conversations as files: save, restore and erase what a slot holds; export, import and verify conversations."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import flask
from werkzeug.exceptions import RequestEntityTooLarge

from strata_core.engine import exchange
from strata_core.engine import sessions as slots
from strata_core.errors import InvalidRequest, NotSupported, StorageError
from strata_core.server import common
from strata_core.server.body import Body, arriving, check_complete, read_json
from strata_core.store.filenames import private_folder, resolve
from strata_core.store.session import SessionFile

blueprint = flask.Blueprint("sessions", __name__)

FIELDS = ("filename",)
"""Of ``POST /slots/{slot_id}``."""

_CHUNK = 1 << 20


@blueprint.post("/slots/<int:slot_id>")
def act_on_slot(slot_id: int) -> flask.Response:
    """Save what a slot holds to a session file, restore it from one, or forget it; llama.cpp's fields."""
    action = flask.request.args.get("action")
    actions = {"save": _save, "restore": _restore, "erase": _erase}
    if action not in actions:
        raise InvalidRequest(f"action must be save, restore or erase, not {action!r}", param="action")
    return flask.jsonify({"id_slot": slot_id} | actions[action](slot_id))


def _save(slot: int) -> dict[str, Any]:
    name, path = _file()
    keep_free = common.parts().settings.session_min_free_mib << 20
    done = slots.save_slot(common.parts().holder.accepting(), slot, path, common.tenant(), keep_free)
    times = {"save_ms": 1e3 * done.seconds}
    return {"filename": name, "n_saved": done.tokens, "n_written": done.nbytes, "timings": times}


def _restore(slot: int) -> dict[str, Any]:
    name, path = _file()
    done = slots.restore_slot(common.parts().holder.accepting(), slot, path, common.tenant())
    times = {"restore_ms": 1e3 * done.seconds}
    return {"filename": name, "n_restored": done.tokens, "n_read": done.nbytes, "timings": times}


def _erase(slot: int) -> dict[str, Any]:
    return {"n_erased": slots.erase_slot(common.parts().holder.accepting(), slot, common.tenant())}


def _file() -> tuple[str, Path]:
    """The file that the request names, and its path in the folder of whoever asks.

    :raises NotSupported: session files are not switched on. :raises InvalidRequest: the name is missing or refused.
    """
    folder = _folder()
    if folder is None:
        raise NotSupported("session files are off: start the server with --session-save-path FOLDER")
    name = Body(read_json(), FIELDS).text("filename")
    if name is None:
        raise InvalidRequest("filename is missing", param="filename")
    return name, resolve(folder, name, "filename")


def _folder() -> Path | None:
    """The folder of the current request's session files, made if it is missing; None when they are off."""
    root = common.parts().settings.session_save_path
    if root is None:
        return None
    root = root.expanduser().resolve()  # the operator may have a link here; what clients name must not be one
    private_folder(root)
    tenant = common.tenant()
    if not tenant:
        return root
    # A folder for each key: names of one say nothing of those of another. Its name is no file name that is allowed.
    own = root / f".{tenant}"
    private_folder(own)
    return own


# -- conversations ----------------------------------------------------------------------------------------------


@blueprint.get("/v1/conversations/<conversation_id>/export")
def export(conversation_id: str) -> flask.Response:
    """The longest copy of a conversation as a session file."""
    engine, tenant = common.engine(), common.tenant()
    with contextlib.ExitStack() as cleanup:
        # Written first and sent then, so that a slow client does not keep pages of memory occupied.
        path = cleanup.enter_context(_scratch()) / "export.sess"
        done = exchange.export(engine, conversation_id, tenant, path)
        file = cleanup.enter_context(path.open("rb"))
        keep = cleanup.pop_all()
    response = flask.Response(_pieces(file, keep), mimetype="application/octet-stream")
    response.content_length = done.nbytes
    response.headers["Content-Disposition"] = f'attachment; filename="{conversation_id}.sess"'
    response.headers["X-Strata-Tokens"] = str(done.tokens)
    response.call_on_close(keep.close)
    return response


def _pieces(file: io.BufferedReader, keep: contextlib.ExitStack) -> Iterator[bytes]:
    with keep:
        while piece := file.read(_CHUNK):
            yield piece


@blueprint.post("/v1/conversations/import")
def import_conversation() -> flask.Response:
    """Take in a session file, which is the request's body; its conversation is then one that is parked."""
    engine, tenant = common.parts().holder.accepting(), common.tenant()
    with _scratch() as folder:
        path = folder / "the uploaded session"
        _receive(path)
        with SessionFile.open(path) as file:
            done = exchange.import_session(engine, file, tenant)
    return flask.jsonify(
        {"id": done.conversation, "tokens": done.tokens, "nbytes": done.nbytes, "place": done.place, "imported": True}
    )


def _receive(path: Path) -> None:
    """Write the request's body to a file.

    :raises RequestEntityTooLarge: it is larger than bodies may be. :raises InvalidRequest: it did not arrive whole.
    """
    request = flask.request
    bound = request.max_content_length
    received = 0
    try:
        with path.open("xb") as file:
            while piece := _next_piece(request):
                received += len(piece)
                file.write(piece)
    except OSError as error:
        raise StorageError(f"the upload cannot be stored: {error.strerror or error}") from error
    if request.content_length is None and bound is not None and received >= bound:
        raise RequestEntityTooLarge  # werkzeug cuts a body of unannounced length off at the bound
    check_complete(request, received)


def _next_piece(request: flask.Request) -> bytes:
    with arriving():
        return request.stream.read(_CHUNK)


@blueprint.post("/v1/conversations/<conversation_id>/verify")
def verify(conversation_id: str) -> flask.Response:
    """Read every stored copy of a conversation and check every page of it."""
    found = exchange.verify(common.parts().holder.accepting(), conversation_id, common.tenant())
    copies = [attrs.asdict(one) | {"ok": one.ok} for one in found]
    return flask.jsonify({"id": conversation_id, "ok": all(one.ok for one in found), "copies": copies})


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A private folder for one file on its way in or out: beside the session files, where there is room for such."""
    base = _folder()
    try:
        folder = tempfile.TemporaryDirectory(prefix=".strata-tmp-", dir=base)
    except OSError as error:
        raise StorageError(f"no temporary folder can be made: {error.strerror or error}") from error
    with folder as name:
        yield Path(name)
