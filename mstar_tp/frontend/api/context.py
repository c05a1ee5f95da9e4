"""The collaborators of every route of one frontend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from os.path import exists
from typing import TypeVar

from starlette.requests import HTTPConnection

from mstar_tp.common.errors import RequestError
from mstar_tp.common.os_process import process_cpus
from mstar_tp.config import ServeConfig
from mstar_tp.config.limits import LimitsConfig
from mstar_tp.frontend.adapters.adapter_folders import AdapterFolders
from mstar_tp.frontend.adapters.load_manager import NOTHING_GIVEN
from mstar_tp.frontend.adapters.on_demand import OnDemand
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels, check_adapter_name
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.access import Access, KeyRing
from mstar_tp.frontend.api.api_errors import ApiError, bad_request
from mstar_tp.frontend.api.body import PARSE_INLINE_BYTES, BodyBudget
from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.text.adapter_tokenizers import AdapterTokenizers
from mstar_tp.frontend.text.images import ImageReader
from mstar_tp.frontend.text.prepare import PreparePool, pool_width, prepare_threads
from mstar_tp.frontend.text.request_params import Limits
from mstar_tp.frontend.text.tokenizer import TextTokenizer
from mstar_tp.frontend.text.tool_forms import FORMS, ToolForm
from mstar_tp.wire.values import AdapterKey

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Frontend:
    """One instance's frontend. The event loop's thread."""

    config: ServeConfig
    conductor: Conductor
    served: ServedModels
    tokenizer: TextTokenizer
    roots: AdapterRoots
    keys: KeyRing = field(default_factory=lambda: KeyRing(()))
    images: ImageReader | None = None
    """The reader of images, where the model reads any."""
    state: StateFile = field(default_factory=lambda: StateFile(None))
    body_budget: BodyBudget = field(default_factory=BodyBudget)
    templates: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="templates")
    )
    """The threads that render chat templates of adapters, which may be waited for."""
    parser: ThreadPoolExecutor = field(default_factory=lambda: prepare_threads(1))
    """The thread that parses large bodies.

    Each has its bytes in ``body_budget``, which bounds how many wait.
    """

    @cached_property
    def prepare(self) -> PreparePool:
        """Return where requests are prepared.

        Only once the ranks are ready: they say what cores they keep busy.
        """
        cpus = process_cpus()
        busy = 1 + sum(ready.cores for ready in self.conductor.group.ready.values())
        width = pool_width(
            self.config.server.prepare_threads,
            (os.cpu_count() or 1) if cpus is None else len(cpus),
            busy,
        )
        logger.info("requests are prepared on %s", _threads(width))
        pool = PreparePool(width, lambda: self.conductor.has_capacity)
        self.conductor.group.on_capacity = pool.look
        return pool

    @cached_property
    def adapter_tokenizers(self) -> AdapterTokenizers:
        lora = self.config.engine.lora
        roots = () if lora is None else lora.real_roots()
        return AdapterTokenizers(self.tokenizer, self.config.engine.model, roots)

    @cached_property
    def on_demand(self) -> OnDemand | None:
        """Return what serves adapters because requests name them; None where that is off."""
        lora = self.config.engine.lora
        if lora is None or not lora.on_demand or lora.adapters_root is None:
            return None

        async def load(name: str, path: str) -> None:
            await self.load_adapter(name, path, in_place=True, on_demand=True)

        folders = AdapterFolders(lora.adapters_root)
        loads = self.conductor.loads
        return OnDemand(folders, self.served, loads, load, most=lora.max_on_demand)

    def limits(self, tokenizer: TextTokenizer | None = None) -> Limits:
        """Return what the ranks serve; answers end as ``tokenizer`` says too.

        Only once they are ready.
        """
        ready = self.conductor.group.ready[0]
        own = (tokenizer or self.tokenizer).eos_ids
        eos = dict.fromkeys((*ready.eos_token_ids, *own, *self.tokenizer.eos_ids))
        return Limits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_ids=tuple(id_ for id_ in eos if id_ < ready.vocab_size),
            max_logprobs=self.config.engine.max_logprobs,
            priorities=self.config.engine.scheduling_policy == "priority",
        )

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Folders of adapters are watched meanwhile, where they are."""
        if self.on_demand is None:
            yield
            return
        for adapter in self.served.on_demand():
            self.on_demand.restored(adapter)
        async with self.on_demand.watched():
            yield

    async def resolve(self, name: str, access: Access, param: str = "model") -> AdapterKey | None:
        """The adapter called ``name``, or None for the base.

        Raises:
            ApiError: 403, ``access`` does not allow it; 404, nothing of that name is served.
        """
        access.check(name, self.served.base_names, param)
        try:
            if self.on_demand is not None and name not in self.served.base_names:
                self.conductor.state.check_open()
                await self.on_demand.ensure(name)
            return self.served.resolve(name)
        except ApiError as error:
            if error.param is not None:
                error.param = param
            raise

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        in_place: bool = False,
        on_demand: bool = False,
        limits: LimitsConfig = NOTHING_GIVEN,
    ) -> None:
        """Serve the adapter in ``path``, once it lies in the roots and every rank accepts it.

        ``limits``: what it may take.

        Raises:
            ApiError: 400, it cannot be served; 404, there is none; 503, not now.
        """
        try:
            check_adapter_name(name, self.served.base_names)
            # On a thread: the folder may be on storage that is slow or gone.
            real = await asyncio.to_thread(self.roots.resolve, path)
            await asyncio.to_thread(self.adapter_tokenizers.read, name, real)
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None
        self.conductor.state.check_open()
        try:
            await self.conductor.loads.load(
                name, real, in_place=in_place, on_demand=on_demand, limits=limits
            )
        except ApiError as error:
            if error.code == "adapter_refused" and not await asyncio.to_thread(exists, real):
                error.status, error.code = 404, "adapter_not_found"
            raise

    async def tokenizer_of(self, key: AdapterKey | None) -> TextTokenizer:
        """Return what prompts and answers of an adapter are written with.

        Raises:
            ApiError: 400, what its folder ships does not go with the base model.
        """
        adapter = None if key is None else self.served.of_key(key)
        if adapter is None:
            return self.tokenizer
        try:
            return await self.adapter_tokenizers.of(adapter)
        except RequestError as error:
            raise bad_request(str(error), param="model") from None

    def tool_form(self, tokenizer: TextTokenizer) -> ToolForm | None:
        """Return how a model with this tokenizer's chat template writes tool calls."""
        named = self.config.server.tool_call_parser
        return tokenizer.template_form if named == "auto" else FORMS.get(named)

    async def render_apart(self, render: Callable[[], T]) -> T:
        """Render a chat template that runs in a process of its own, one at a time.

        Raises:
            ApiError: 400, it refuses the chat, or takes too long over it.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self.templates, render)
        except ApiError:
            raise
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None

    async def parsed(self, data: bytes, make: Callable[[bytes], T]) -> T:
        """Return what ``make`` reads from a body.

        Large bodies are read on a thread, one at a time.

        Raises:
            ApiError: ``make`` refuses it.
        """
        if len(data) <= PARSE_INLINE_BYTES:
            return make(data)
        return await asyncio.get_running_loop().run_in_executor(self.parser, make, data)

    def client(self, request: HTTPConnection) -> Access:
        """Return what the request may name.

        Raises ApiError: 401, it carries none of the API keys.
        """
        return self.keys.client(request)

    def check_operator(self, request: HTTPConnection) -> None:
        """Raises ApiError: 401 or 403, the request's key is no operator's."""
        self.keys.operator(request)


def _threads(width: int) -> str:
    return "the event loop" if width == 1 else f"{width} threads"
