"""Requests made up from /openapi.json, by schemathesis: no endpoint fails, and answers are as they are described."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.programs import Program

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_that_is_made_up_makes_an_endpoint_fail(
    program: Callable[[str], Program], variables: dict[str, str]
) -> None:
    schemathesis = program("schemathesis")
    schemathesis.call(
        [
            *(schemathesis.command("st"), "run", f"{variables['GATEWAY_URL']}/openapi.json"),
            *(
                "--checks",
                CHECKS,
                "--max-examples",
                "25",
                "--generation-deterministic",
                "--request-timeout",
                "60",
            ),
        ],
        timeout_s=1200,
    )
