"""The errors that Strata reports to people.

Every error that a user can cause or meet derives from :class:`StrataError`; its message is written for that user and
names what was wrong. Anything else that escapes is a bug and is shown as a traceback (HTTP 500). Leaves also inherit
the standard class that Python code would expect, so that library users may catch either.
"""

from __future__ import annotations


class StrataError(Exception):
    """Root of all reported errors.

    Class attributes, overridden by leaves:

    * ``exit_code`` - status of a ``strata`` command that ends with this error.
    * ``http_status`` - status of an HTTP reply that carries it.
    * ``code`` - stable machine-readable word in HTTP replies and logs.

    :param param: the request field, setting, key or tensor that was wrong, where there is one.
    """

    exit_code = 1
    http_status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class SettingsError(StrataError, ValueError):
    """A setting is unknown, cannot be parsed, is out of range or is given twice with different values."""

    exit_code = 2
    http_status = 400
    code = "invalid_setting"


class InvalidRequest(StrataError, ValueError):
    """A request has a missing, malformed or out-of-range field (named by ``param``)."""

    http_status = 400
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt (or prompt plus requested tokens) does not fit the context; the message has both numbers."""

    code = "context_length_exceeded"


class TemplateError(InvalidRequest):
    """The model has no usable chat template, or the template refused or failed on these messages."""

    code = "chat_template_error"


class NotFound(StrataError, LookupError):
    """A model, conversation, request or route that was named does not exist."""

    exit_code = 3
    http_status = 404
    code = "not_found"


class Unauthorized(StrataError, PermissionError):
    """API keys are configured and the request carries none that matches."""

    http_status = 401
    code = "invalid_api_key"


class Forbidden(StrataError, PermissionError):
    """The request came from a host name or browser origin that is not allowed."""

    http_status = 403
    code = "forbidden"


class Overloaded(StrataError, RuntimeError):
    """The queue is full, or the server is loading or draining; the client may retry after ``retry_after`` seconds."""

    http_status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class Conflict(StrataError, RuntimeError):
    """What was asked for cannot be done now, because something else uses what it concerns."""

    http_status = 409
    code = "conflict"


class NotSupported(StrataError, NotImplementedError):
    """This server was not configured for what was asked for; the message says how it is."""

    http_status = 501
    code = "not_supported"


class SessionFileError(StrataError, ValueError):
    """A session file is damaged, cut short, of an unknown version or no session file at all."""

    http_status = 400
    code = "damaged_session"


class IdentityMismatch(StrataError, ValueError):
    """Stored keys and values are of another model, K/V type or tenant; the message has what differs."""

    http_status = 400
    code = "identity_differs"


class StorageError(StrataError, OSError):
    """A file that was asked for cannot be read or written; the message has the system's reason."""

    code = "storage_error"


class InsufficientStorage(StorageError):
    """There is not enough space for what was to be kept; nothing was."""

    http_status = 507
    code = "insufficient_storage"


class Cancelled(StrataError, RuntimeError):
    """The request was cancelled by its client before it finished."""

    http_status = 499
    code = "cancelled"


class ModelFileError(StrataError, ValueError):
    """A model file is damaged, incomplete or not of a supported kind; ``param`` names the key or tensor."""

    exit_code = 4
    code = "model_file_error"


class UnsupportedModel(ModelFileError):
    """The file is well formed, but nothing installed can run this architecture, tensor type or option."""

    code = "unsupported_model"


class DownloadError(StrataError, OSError):
    """A model could not be fetched, or what arrived does not have the expected digest."""

    exit_code = 5
    code = "download_error"


class PluginError(StrataError, RuntimeError):
    """A plugin that was asked for by name is not installed, failed to import or broke its contract."""

    exit_code = 6
    code = "plugin_error"


class OutOfMemory(StrataError, MemoryError):
    """Memory that is needed is not there; the message has the arithmetic. Nothing was changed."""

    exit_code = 7
    http_status = 503
    code = "out_of_memory"


class LevelError(StrataError, RuntimeError):
    """A storage level could not do what was asked; the caller counts it and goes on without that level."""

    code = "level_error"


class CannotAdopt(LevelError):
    """A level does not know how to take entries over from another one without the engine's memory."""


class DamagedEntry(LevelError):
    """A stored conversation failed verification; what was damaged is never offered again.

    :param good_tokens: how many of its leading tokens the level still offers, under the same entry id.
    """

    code = "damaged_entry"

    def __init__(self, message: str, *, good_tokens: int = 0):
        super().__init__(message)
        self.good_tokens = good_tokens


class BackendError(StrataError, RuntimeError):
    """A compute backend failed while executing a step."""

    code = "backend_error"
