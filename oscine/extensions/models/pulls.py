"""Downloads models of the Hugging Face hub into --models-dir, and removes models from there.

A download whose client leaves goes on. The next request for it waits for the same files, and then serves the model.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from oscine.api.common.errors import APIError, not_found
from oscine.api.serving.served_model import PullProgress, ServedModel
from oscine.checkpoint.download import Blob, blobs_of
from oscine.checkpoint.hub import find_model, pull
from oscine.extensions.models.sources import Source, downloaded, hub_name
from oscine.settings.config import Config

_LOOK_S = 0.25  # between looks at what has arrived


class Pulls:
    def __init__(self, config: Config, add: Callable[[Source], None]) -> None:
        """`add` is called with each model that was downloaded."""
        folder = config.models.models_dir
        self._folder = None if folder is None else Path(folder)
        self._engine, self._add = config.engine, add
        self._running: set[str] = set()  # names on the hub

    async def pull(self, name: str, find: Callable[[str | None], ServedModel | None]) -> AsyncIterator[PullProgress]:
        """`find`: a model that is served already. Raises APIError."""
        yield PullProgress("pulling manifest")
        if find(name) is None and find(hub_name(name)) is None:
            folder = self._dir()
            source = downloaded(hub_name(name), folder, self._engine)
            if source.name in self._running:
                raise APIError(f"The model {source.name!r} is being pulled already.", status=409, code="conflict")
            self._running.add(source.name)
            try:
                async for progress in self._fetch(source, folder):
                    yield progress
                self._add(source)
            finally:
                self._running.discard(source.name)
        yield PullProgress("success")

    async def _fetch(self, source: Source, folder: Path) -> AsyncIterator[PullProgress]:
        model = source.options.model
        try:
            found = await asyncio.to_thread(_blobs, source.name, model.revision, folder)
            fetching = asyncio.create_task(asyncio.to_thread(pull, model))
            fetching.add_done_callback(lambda task: task.cancelled() or task.exception())  # the client may have left
            while not fetching.done():
                for blob in found:
                    yield _progress(blob)
                await asyncio.wait((fetching,), timeout=_LOOK_S)
            await fetching
            for blob in found:
                yield _progress(blob)
            yield PullProgress("verifying sha256 digest")
            await asyncio.to_thread(find_model, model)
        except ValueError as error:
            unknown = "is not on the hub" in str(error) or "is neither" in str(error)
            if unknown:
                raise not_found(f"pull model manifest: {error}", "model_not_found", "model") from None
            raise APIError(f"{error}.", status=502, type="api_error", code="pull_failed") from None

    def _dir(self) -> Path:
        if self._folder is None:
            raise APIError("This server pulls no models: start it with --models-dir.", code="unsupported")
        return self._folder

    def check_deletable(self, source: Source | None) -> None:
        """Raises APIError for a model that is not in --models-dir."""
        folder = self._dir()
        inside = source is not None and source.path is not None and source.path.parent == folder
        if not inside:
            raise APIError("The model is not in --models-dir, so its files stay.", code="unsupported")

    def remove(self, source: Source) -> None:
        """Deletes the model's files. Raises OSError."""
        assert source.path is not None
        if source.path.is_dir() and not source.path.is_symlink():
            shutil.rmtree(source.path)
        else:
            source.path.unlink()


def _blobs(name: str, revision: str | None, folder: Path) -> list[Blob]:
    """The large files of a repository. Raises ValueError."""
    from huggingface_hub import errors

    of_its_library: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    try:
        return blobs_of(name, revision, str(folder), lambda file: "/" not in file)
    except errors.RepositoryNotFoundError:
        raise ValueError(f"model {name!r} is not on the hub, or HF_TOKEN may not read it") from None
    except (of_its_library, errors.HFValidationError, OSError) as error:
        raise ValueError(f"model {name!r} cannot be fetched: {str(error).strip().splitlines()[0]}") from None


def _progress(blob: Blob) -> PullProgress:
    return PullProgress(f"pulling {blob.sha256[:12]}", f"sha256:{blob.sha256}", blob.size, min(blob.held, blob.size))
