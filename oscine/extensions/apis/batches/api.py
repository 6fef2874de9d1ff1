"""Files and batches as a part of the server."""

from oscine.api.common.errors import Error
from oscine.api.common.paging import PageQuery
from oscine.api.interface import Api
from oscine.api.openapi import DELETE, GET, POST, Operation
from oscine.api.serving.service import Service
from oscine.extensions.apis.batches.endpoint import Batches, Files
from oscine.extensions.apis.batches.jobs import BatchJobs
from oscine.extensions.apis.batches.schemas import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    FilesQuery,
    FileUpload,
)


class BatchesApi(Api):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.jobs = BatchJobs(service)

    @property
    def operations(self) -> list[Operation]:
        files, batches, file, batch = Files(self.jobs), Batches(self.jobs), "/v1/files/{id}", "/v1/batches/{id}"
        off = {"501": Error}
        stored = {**off, "413": Error, "415": Error, "408": Error, "400": Error}
        return [
            POST("/v1/files", files.create, "Upload a file", form=FileUpload, answer=FileObject, other=stored),
            GET("/v1/files", files.list, "List files", query=FilesQuery, answer=FileList, other=off),
            GET(file, files.retrieve, "One file", answer=FileObject, other=off),
            GET(
                f"{file}/content", files.content, "The content of a file", answer="application/octet-stream", other=off
            ),
            DELETE(file, files.delete, "Delete a file", answer=DeletedFile, other={**off, "409": Error}),
            POST(
                "/v1/batches",
                batches.create,
                "Create a batch",
                body=BatchRequest,
                answer=BatchObject,
                example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
                other={**off, "429": Error},
            ),
            GET("/v1/batches", batches.list, "List batches", query=PageQuery, answer=BatchList, other=off),
            GET(batch, batches.retrieve, "One batch", answer=BatchObject, other=off),
            POST(f"{batch}/cancel", batches.cancel, "End a batch", answer=BatchObject, other={**off, "409": Error}),
        ]

    async def open(self) -> None:
        """Raises ValueError when the folder of files cannot be used."""
        await self.jobs.store.open()

    async def started(self) -> None:
        await self.jobs.go_on()

    async def drain(self) -> None:
        """Batches stop at once: the next server goes on with them."""
        await self.jobs.stop()

    async def stop(self) -> None:
        await self.jobs.stop()

    async def close(self) -> None:
        await self.jobs.store.close()

    @property
    def is_quiet(self) -> bool:
        return self.jobs.has_few
