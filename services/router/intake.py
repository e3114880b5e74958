"""What every dialect needs to turn a call into a request: who asks, which model, whether it is admitted."""

import asyncio
import re
import secrets
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from schemas.block_key import namespace_seed, tenant_salt
from services.router.api.body import decode_object, read_body
from services.router.api.errors import ApiError, shown
from services.router.api.images import NOT_INSTALLED, ImageLimits, Images
from services.router.api.vigil import Patience
from services.router.calls import Call
from services.router.core.admission import broker_failure
from services.router.core.context import Context, KeyScheme
from services.router.core.context_memo import ContextMemo
from services.router.core.failure import INTERNAL, INVALID, NOT_FOUND, Failure, invalid, unavailable
from services.router.core.identity import OWN, Identity, IdentityError, identify
from services.router.core.identity_volatile import without_volatile
from services.router.core.spec import Spec
from services.router.directory import DirectoryGone
from services.router.keys import Caller
from services.router.text.images import ImageRefused, processors_installed
from services.router.text.layout import Prompt, Shown
from services.router.text.tokenizer import Tokenizer
from services.router.text.worker_process import WorkerFailed

if TYPE_CHECKING:
    from services.router.service import RouterService

_ID_CHARACTERS = 80
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_POLL_S = 0.05
MEMO_BYTES = 256 << 20
"""What contexts kept for the next request of their branch may take."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A call read and identified. `id` is ours and unique; `request_id` is what the client calls it.

    `traceparent`: the W3C trace the call belongs to, None without a usable one.
    """

    id: str
    request_id: str
    created: int
    caller: Caller
    identity: Identity
    raw: dict[str, Any]
    traceparent: str | None = None


class Intake:
    """The way in for requests that generate."""

    def __init__(self, service: "RouterService") -> None:
        self._service = service
        settings = service.app.settings
        self.bus, self.subjects, self.directory = service.app.bus, service.subjects, service.dispatcher.directory
        self.patience = Patience(settings.keep_alive_s, settings.idle_client_s)
        self.timeout_s = settings.request_timeout_s
        self._memo = ContextMemo(MEMO_BYTES)
        self.formats = service.formats
        self.default_max_tokens = settings.default_max_tokens
        self._image_limits = ImageLimits(settings.images_limit, settings.image_limit_bytes)

    def wall(self) -> float:
        """Unix seconds."""
        return self._service.app.clock.wall()

    def max_context_tokens(self) -> int:
        """Tokens of prompt and answer together."""
        return self._service.core.max_context_tokens

    def caller(self, request: Request) -> Caller:
        """Who calls; 401 when the keys say nobody."""
        found = self._service.keys.caller(request.headers, request.client.host if request.client else None)
        if isinstance(found, Failure):
            raise ApiError(found)
        return found

    async def body(self, request: Request) -> dict[str, Any]:
        """The call's JSON object; 415 for one that is compressed."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            text = f"content-encoding {shown(encoding)} is not supported here, bodies come as they are"
            raise ApiError(Failure(415, INVALID, text, "content-encoding", "unsupported_encoding"))
        return decode_object(await read_body(request, self._service.app.settings.body_limit_bytes))

    async def ask(self, request: Request) -> Asker:
        """Read and identify a call."""
        caller = self.caller(request)
        raw = await self.body(request)
        try:
            identity = identify(caller.tenant, request.headers, raw)
        except IdentityError as error:
            raise ApiError(invalid(str(error), error.param)) from error
        await self._check_parent(identity)
        given = request.headers.get("x-request-id", "")
        usable = given.isascii() and given.isprintable() and " " not in given
        given = given[:_ID_CHARACTERS] if usable else ""
        own = f"{given or 'req'}-{secrets.token_hex(8)}"
        trace = request.headers.get("traceparent", "")
        followed = trace if _TRACEPARENT.match(trace) else None
        return Asker(own, given or own, int(self.wall()), caller, identity, self.without_volatile(raw), followed)

    def without_volatile(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A body without a first system block that changes with every request."""
        return without_volatile(raw, self._service.app.settings.volatile_prefixes)

    def loaded_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None until it is loaded."""
        return self._service.tokenizer

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; 503 until it is loaded."""
        found = self._service.tokenizer
        if found is None:
            raise ApiError(unavailable("the model's tokenizer is not loaded yet", "no_tokenizer"))
        return found

    def takes_images(self) -> bool:
        """Whether the model has a processor of images that can be loaded here."""
        tokenizer = self.loaded_tokenizer()
        return tokenizer is not None and bool(tokenizer.image_folder) and processors_installed()

    def images(self) -> Images:
        """Where the images of one request are put; for a model that takes text only, refused."""
        if not self.tokenizer().image_folder:
            return Images()
        return Images(self._image_limits) if self.takes_images() else Images(None, NOT_INSTALLED)

    async def shown(self, images: Images) -> list[Shown]:
        """Images as the model's own processor lays them out; 400 names one that is none."""
        if not images.found:
            return []
        try:
            return await self._service.images.shown(self.tokenizer().image_folder, await images.decoded())
        except ImageRefused as error:
            raise ApiError(invalid(str(error), error.where)) from error
        except WorkerFailed as error:
            raise ApiError(Failure(500, INTERNAL, f"the model's processor of images failed: {error}")) from error

    def model_name(self) -> str:
        """The id of the model served; 503 while no node has said it."""
        reference = self._service.core.nodes.reference
        name = self._service.app.settings.model_name or (reference.model if reference else "")
        if not name:
            raise ApiError(unavailable("no node has said yet which model is served", "no_model"))
        return name

    def knows(self, tenant: str, branch: str) -> bool:
        """Whether this router has served the branch."""
        return self._service.core.memory.knows(tenant, branch)

    def check_model(self, wanted: str | None) -> None:
        """404 for a model that is not served. None and "" mean the one that is."""
        name = self.model_name()
        aliases = self._service.app.settings.model_aliases
        if wanted and wanted != name and not any(fnmatchcase(wanted, alias) for alias in aliases):
            message = f"model {wanted[:100]!r} is not served here, {name!r} is"
            raise ApiError(Failure(404, NOT_FOUND, message, "model", "model_not_found"))

    async def admit(
        self, asker: Asker, prompt_tokens: int, limit: int | None, default: int, where: str = "messages"
    ) -> int:
        """Tokens the answer may have; ApiError when the request is refused. `where`: the field with the prompt."""
        if self._service.app.stopping.is_set():
            raise ApiError(unavailable("this router is stopping", "stopping"))
        await self._broker()
        core = self._service.core
        failure = core.admission(prompt_tokens, limit)
        if failure is not None:
            raise ApiError(replace(failure, param=where) if failure.param == "messages" else failure)
        return limit if limit is not None else min(default, core.max_context_tokens - prompt_tokens)

    def context(self, asker: Asker, prompt: Prompt) -> Context:
        """The prompt with its digests, under the tenant's own keys."""
        packed = prompt.packed
        reference = self._service.core.nodes.reference
        if reference is None:
            raise ApiError(unavailable("no node is known yet", "no_node"))
        self._service.breaks.observe(asker.identity, packed, self.tokenizer().decode, self.wall())
        seed = namespace_seed(None, tenant_salt(asker.identity.tenant))
        scheme, who = KeyScheme(reference.block_size, reference.key_version, seed), asker.identity
        departure = self._memo.departure(packed, scheme, who.branch)
        if departure is not None:
            self._service.metrics.departed(departure, self.tokenizer().decode)
        made = self._memo.context(packed, scheme, who.branch, who.parent)
        return replace(made, media=prompt.media) if prompt.media else made

    def answered(self, asker: Asker, context: Context, tokens: list[int]) -> None:
        """The whole answer to a context: the branch's next prompt is expected to repeat it."""
        if asker.identity.branch is not None and tokens:
            self._memo.answered(context, tokens[:-1], asker.identity.branch)

    def open(self, spec: Spec) -> Call:
        return self._service.dispatcher.open(spec)

    def cancel(self, call: Call, reason: str) -> None:
        """The client is gone or stuck; nothing happens once the request has ended."""
        if call.end is None:
            self._service.metrics.client_cancelled(reason)
            self._service.dispatcher.cancel(call)

    def stop(self, call: Call) -> None:
        self._service.dispatcher.stop(call)

    async def _broker(self) -> None:
        """Wait a little for a broker that is away; 503 when it stays away."""
        bus, limit_s = self._service.app.bus, self._service.app.settings.broker_timeout_s
        deadline = self._service.app.clock.now() + limit_s
        while not bus.connected:
            if self._service.app.clock.now() >= deadline:
                raise ApiError(broker_failure(limit_s))
            await asyncio.sleep(_POLL_S)

    async def _check_parent(self, identity: Identity) -> None:
        """400 for a parent that nobody knows; a directory that keeps silent is no reason to refuse, and no harness is
        refused for what it says of its own accord."""
        parent, service = identity.parent, self._service
        if identity.dialect != OWN or parent is None or service.core.memory.knows(identity.tenant, parent):
            return
        try:
            known = await self.directory.branches(identity.tenant, parent)
        except DirectoryGone:
            return
        if not known:
            raise ApiError(invalid(f"branch {parent[:100]!r}, named as parent, is not known", "branch.parent"))
