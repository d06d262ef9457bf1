"""OpenAI's Files, as the table of APIs has them."""

from typing import Final

from tokenmesh.services.gateway.apis.files.routes import files_router
from tokenmesh.services.gateway.core.api import AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.files.contents import JOURNAL, open_file_journal
from tokenmesh.services.gateway.core.files.uploads import FileDeleted, FileList, FileObject
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    return Routes(routers=[files_router(core)])


FILES: Final = Api(
    name=JOURNAL,
    open_journal=open_file_journal,
    build=build,
    # Their creation has been counted, and clients poll them.
    exempt={"GET": ("/v1/files/[^/]+",), "DELETE": ("/v1/files/[^/]+",)},
    answers={
        ("post", "/v1/files"): AnswerShape([FileObject]),
        ("get", "/v1/files"): AnswerShape([FileList]),
        ("get", "/v1/files/{file_id}"): AnswerShape([FileObject]),
        ("get", "/v1/files/{file_id}/content"): AnswerShape(media_type="application/octet-stream"),
        ("delete", "/v1/files/{file_id}"): AnswerShape([FileDeleted]),
    },
)
