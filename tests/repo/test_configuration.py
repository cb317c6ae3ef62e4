"""What is written from the declarations of settings is what the repository has."""

from __future__ import annotations

import pytest

from scripts.configuration import PAGE, SCHEMA, SERVICES, page, schema

STALE = "stale: run make configuration"


def test_the_page_of_settings_is_fresh() -> None:
    assert PAGE.read_text() == page(), STALE


def test_the_chart_s_schema_is_fresh() -> None:
    assert SCHEMA.read_text() == schema(SCHEMA.read_text()), STALE


def test_a_schema_without_a_place_for_a_service_is_refused() -> None:
    with pytest.raises(ValueError, match="drafterConfig"):
        schema(SCHEMA.read_text().replace('"drafterConfig": {', '"otherConfig": {'))


@pytest.mark.parametrize("service", SERVICES)
def test_each_setting_has_one_sentence(service: str) -> None:
    for name, field in SERVICES[service].model_fields.items():
        sentence = field.description or ""
        assert sentence[:1].isupper() or sentence[:1] == "`", name
        assert sentence.endswith("."), name
        assert ". " not in sentence, name
