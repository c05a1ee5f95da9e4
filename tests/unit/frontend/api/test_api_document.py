"""The API's own document is true: whatever schemathesis makes of it is answered as it says, never
with a server error; and a body that does not come is given up.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.api_kit import Api
from test_api_tools import TEMPLATE

from mstar_tp.frontend.api.openapi import document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ROUTES = [(path, method) for path, methods in document()["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("document"), chat=TEMPLATE)
    yield api
    api.close()


@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_every_route_answers_as_the_document_says(api: Api, path: str, method: str) -> None:
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    operation = schema[path][method.upper()]

    @seed(7)
    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and case.body.get("model"):
            case.body["model"] = "tiny"
        case.call_and_validate(base_url=api.url, checks=CHECKS)

    run()
