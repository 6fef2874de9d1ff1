"""The JSON of vector stores, their files and searches, as OpenAI has it."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from oscine.api.common.ids import Id
from oscine.api.common.paging import PageQuery
from oscine.api.serving.parameters import Share, about, ignored
from oscine.extensions.apis.responses.schemas import Metadata
from oscine.extensions.file_search.reader.messages import ErrorCode

MAX_FILES = 2000  # of one request
MAX_RESULTS = 50
CHUNK_TOKENS, OVERLAP_TOKENS = 800, 400  # of the strategy `auto`

FileStatus = Literal["in_progress", "completed", "failed", "cancelled"]
StoreStatus = Literal["in_progress", "completed", "expired"]
NumResults = Annotated[int, Meta(ge=1, le=MAX_RESULTS)]
Weight = Annotated[float, Meta(ge=0, le=1000)]
FileIds = Annotated[list[Id], Meta(max_length=MAX_FILES)]
Name = Annotated[str, Meta(max_length=256)]
Query = Annotated[str, Meta(min_length=1, max_length=8192)]
Queries = Annotated[list[Query], Meta(min_length=1, max_length=16)]
Value = Annotated[str, Meta(max_length=512)] | int | float | bool
Attributes = Annotated[dict[Annotated[str, Meta(max_length=64)], Value], Meta(max_length=16)]
Filters = dict[str, Any]  # see oscine.extensions.file_search.schemas.filters


class ExpiresAfter(Struct):
    days: Annotated[int, Meta(ge=1, le=365), about("Days without a search or a new file.")]
    anchor: Annotated[Literal["last_active_at"], about("The time from which they count.")]


class StaticChunks(Struct):
    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096), about("Tokens of a chunk.")]
    chunk_overlap_tokens: Annotated[int, Meta(ge=0), about("Tokens that a chunk shares with the one before it.")]


class ChunkingStrategy(Struct):
    type: Annotated[Literal["auto", "static"], about(f"`auto` is {CHUNK_TOKENS} tokens, {OVERLAP_TOKENS} shared.")]
    static: Annotated[StaticChunks | None, about("The sizes, for the type `static`.")] = None


class StoreRequest(Struct):
    name: Annotated[Name, about("A name for people.")] = ""
    description: Annotated[Annotated[str, Meta(max_length=512)] | None, about("What the store is for.")] = None
    file_ids: Annotated[FileIds, about("Uploaded files that it begins with.")] = []
    chunking_strategy: Annotated[ChunkingStrategy | None, about("How these files are cut.")] = None
    expires_after: Annotated[ExpiresAfter | None, about("When the store expires.")] = None
    metadata: Annotated[Metadata | None, about("Up to 16 pairs that are kept with the store.")] = None


class StoreChange(Struct):
    """Fields that are not sent stay as they are."""

    name: Annotated[Name | UnsetType | None, about("A name for people.")] = UNSET
    expires_after: Annotated[ExpiresAfter | UnsetType | None, about("When the store expires.")] = UNSET
    metadata: Annotated[Metadata | UnsetType | None, about("Up to 16 pairs.")] = UNSET


class FileRequest(Struct):
    file_id: Annotated[Id, about("An uploaded file. One that is in the store already is read again.")]
    attributes: Annotated[Attributes | None, about("Up to 16 pairs, which filters compare.")] = None
    chunking_strategy: Annotated[ChunkingStrategy | None, about("How the file is cut.")] = None


class FileBatchRequest(Struct):
    file_ids: Annotated[FileIds, about("Uploaded files, all with the same attributes and strategy.")] = []
    files: Annotated[
        list[FileRequest], Meta(max_length=MAX_FILES), about("Or files with attributes of their own.")
    ] = []
    attributes: Annotated[Attributes | None, about("Of the files in `file_ids`.")] = None
    chunking_strategy: Annotated[ChunkingStrategy | None, about("Of the files in `file_ids`.")] = None


class AttributesRequest(Struct):
    attributes: Annotated[Attributes | None, about("The new pairs; those before are forgotten.")]


class Weights(Struct):
    embedding_weight: Annotated[Weight, about("Of the ranking by embeddings.")] = 1.0
    text_weight: Annotated[Weight, about("Of the ranking by words.")] = 1.0


class RankingOptions(Struct):
    ranker: Annotated[Literal["none", "auto", "default-2024-11-15"] | None, ignored("there is one ranker")] = None
    score_threshold: Annotated[Share | None, about("Results with a lower score are left out.")] = None
    hybrid_search: Annotated[Weights | None, about("Weights of the two rankings; needs `--embeddings-url`.")] = None


class SearchRequest(Struct):
    query: Annotated[Query | Queries, about("A text or several, which are searched together.")]
    filters: Annotated[Filters | None, about("A condition on the attributes of files.")] = None
    max_num_results: Annotated[NumResults, about("Results at most.")] = 10
    ranking_options: Annotated[RankingOptions | None, about("Least score, and weights.")] = None
    rewrite_query: Annotated[bool | None, ignored("the query is searched as it is")] = None


class FilesQuery(PageQuery):
    filter: FileStatus | None = None


class FileCounts(Struct):
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    total: int = 0


class VectorStore(Struct, kw_only=True):
    id: str
    object: Literal["vector_store"] = "vector_store"
    created_at: int
    name: str
    description: str | None = None
    usage_bytes: int = 0
    file_counts: FileCounts
    status: StoreStatus = "completed"
    expires_after: ExpiresAfter | None = None
    expires_at: int | None = None
    last_active_at: int
    metadata: dict[str, str]


class LastError(Struct):
    code: ErrorCode
    message: str


class StaticStrategy(Struct):
    type: Literal["static"]
    static: StaticChunks


class VectorStoreFile(Struct, kw_only=True):
    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    usage_bytes: int = 0
    created_at: int
    vector_store_id: str
    status: FileStatus = "in_progress"
    last_error: LastError | None = None
    chunking_strategy: StaticStrategy
    attributes: Attributes = {}


class VectorStoreFileBatch(Struct, kw_only=True):
    id: str
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"
    created_at: int
    vector_store_id: str
    status: FileStatus
    file_counts: FileCounts


class DeletedStore(Struct):
    id: str
    object: Literal["vector_store.deleted"] = "vector_store.deleted"
    deleted: bool = True


class DeletedStoreFile(Struct):
    id: str
    object: Literal["vector_store.file.deleted"] = "vector_store.file.deleted"
    deleted: bool = True


class VectorStoreList(Struct):
    object: Literal["list"]
    data: list[VectorStore]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VectorStoreFileList(Struct):
    object: Literal["list"]
    data: list[VectorStoreFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TextContent(Struct):
    text: str
    type: Literal["text"] = "text"


class StoredContent(Struct):
    object: Literal["vector_store.file_content.page"]
    data: list[TextContent]
    has_more: bool
    next_page: str | None


class SearchResult(Struct):
    file_id: str
    filename: str
    score: float
    attributes: Attributes
    content: list[TextContent]


class SearchResults(Struct):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool
    next_page: str | None
