"""The JSON of files and batches, as OpenAI has it."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from oscine.api.common.ids import Id
from oscine.api.common.paging import PageQuery
from oscine.api.serving.parameters import about, ignored
from oscine.extensions.apis.responses.schemas import Metadata

Url = Literal["/v1/chat/completions", "/v1/responses", "/v1/completions"]
UploadPurpose = Literal["batch", "assistants", "user_data"]
Purpose = UploadPurpose | Literal["batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
TERMINAL = ("failed", "completed", "expired", "cancelled")


class FileObject(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class DeletedFile(Struct):
    id: str
    object: Literal["file"]
    deleted: bool


class FileUpload(Struct):
    """The parts of a form."""

    file: Annotated[str, Meta(description="The file.", extra_json_schema={"format": "binary"})]
    purpose: Annotated[UploadPurpose, about("`batch`, or one of those for vector stores.")]


class FilesQuery(PageQuery):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    purpose: Purpose | None = None


class FileList(Struct):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchError(Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRequest(Struct):
    input_file_id: Annotated[Id, about("An uploaded file: one request per line.")]
    endpoint: Annotated[Url, about("The endpoint of all requests.")]
    completion_window: Annotated[Literal["24h"], about("The time after which the batch expires.")]
    metadata: Annotated[Metadata | None, about("Up to 16 pairs that are kept with the batch.")] = None
    output_expires_after: Annotated[Any, ignored("the files stay until they are deleted")] = None


class BatchObject(Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: Url
    model: str | None = None  # of the first line
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(Struct):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
