"""What keeps an answer from being stored, and what does not."""

from __future__ import annotations

import re
import string
import sys
from importlib import import_module
from pathlib import Path

import phonenumbers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phonenumbers import PhoneNumberFormat, PhoneNumberType

from pipeline.cache.redaction import KINDS, PHONE_REGIONS, Redaction
from pipeline.cache.setup import CacheSetupError, open_cache
from pipeline.recipe import CacheSettings

ALL = Redaction()
HELD = {
    "e-mail": ["Write to ada.l+x@example.co.uk.", "ada@example.org"],
    "card": [
        "4111 1111 1111 1111", "card 5500-0000-0000-0004 is declined", "378282246310005", "It is 4111111111111111.",
        "4111.1111.1111.1111.", "3782 822463 10005", "4111 1111 1111 1111 12/27 123", "30569309025904",
    ],
    "key": [
        "sk-abcdefghij0123456789ABCD", "use AKIAIOSFODNN7EXAMPLE", "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "-----BEGIN RSA PRIVATE KEY-----", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_def",
        "Authorization: Bearer 0123456789abcdef0123456789abcdef", "postgres://app:hunter2@db.internal:5432/orders",
        "redis://:s3cret@cache:6379/0", "Server=db;User Id=sa;Password=Pa55w0rd;",
        f"SG.{'aB3_' * 5}xy.{'dE-9' * 10}xyz",
    ],
    "iban": [
        "DE89 3704 0044 0532 0130 00 is mine", "gb29nwbk60161331926819.", "FR14\u00a02004 1010 0505 0001 3M02 606",
    ],
    "national_id": [
        "123-45-6789", "My SSN is 536904399", "AB 12 34 56 C", "12345678Z", "390.533.447-05", "2 95 10 99 126 111 93",
        "86 095 742 719", "BSN: 111222333", "Aadhaar 234123412346", "756.9217.0769.85",
    ],
    "phone": [
        "Call +44 20 7946 0958", "(555) 010-9999", "555-010-9999 at night", "+1 (415) 555-2671", "020 7946 0958",
        "07700 900123", "01 23 45 67 89", "01.23.45.67.89", "0171-1234567", "030/123 45 67 89", "0044 20 7946 0958",
        "call me at 4155552671", "Tel: 612345678", "1-800-555-0199", "98765 43210", "02079460958",
    ],
}  # fmt: skip
PASSES = [
    "It costs $1,299.99 since 2024-05-17.", "Order 4111 1111 1111 1112 was sent.", "pi is 3.14159265358979323846",
    "Version 1.2.3-4567", "10 + 20 = 30", "at 10:30:00 on 12.05.2024", "user @ home", "skiing-lessons for all of us",
    "tracking 00340434161094042557 x", "IP 192.168.100.200", "sk_buff_alloc_with_headroom",
    "sk-learn-pipelines-for-2024",
    "Bearer of bad news since 1999", "postgres://user:${PASSWORD}@host/db", "http://localhost:8080/a@b",
    "2024-05-17 12:30:45.123456", "01.02.2024 10:30", "0.123456789", "Boston, MA 02110-1301", "512 345 678 people",
    "order 4155552671", "timestamp 1732192345123", "uuid 123e4567-e89b-12d3-a456-426614174000",
    "DE88 3704 0044 0532 0130 00",
    "earn 75000-90000", "invest 4000-6000 a month",
    "0123456789abcdef", 'digits = "0123456789"', "rooms 2018 2019 2020 2021",
    "-17.909075, 100.347211",
    "05 48 47 30 02 05", "DFARS 252.227-7013", "ISBN 978-3-16-148410-0", "3528 4421 9987 1254 5521 8733 1020",
]  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_held(kind: str) -> None:
    others = Redaction(kinds=[other for other in KINDS if other != kind])
    for text in HELD[kind]:
        assert ALL.objection("Hi", text) == ALL.objection(text, "Hi") == kind, text
        # Some national numbers are grouped as telephone numbers are, and a password may look like an address.
        assert others.objection("Hi", text) is None or kind in ("national_id", "key"), text


@pytest.mark.parametrize("text", PASSES)
def test_passes(text: str) -> None:
    assert ALL.objection(text, text) is None


# Numbers that the networks and their acquirers publish for tests.
CARDS = (
    "4111111111111111", "4012888888881881", "5555555555554444", "5105105105105100", "2223003122003222",
    "378282246310005",
    "371449635398431", "30569309025904", "38520000023237", "6011111111111117", "6011000990139424", "3530111333300000",
    "6200000000000005", "6759649826438453", "4222222222222",
)  # fmt: skip


@given(
    st.sampled_from(CARDS),
    st.sampled_from(["", " ", "  ", "\u00a0", "\u2009", "\u202f", "-", "\u2011", "\u2013", "."]),
    st.sampled_from(["{}", "{}.", "My card: {}, valid", "({})", "{} 12/27", "{}\n", "**{}**"]),
)
@settings(deadline=None)
def test_cards_however_they_are_written(card: str, separator: str, around: str) -> None:
    sizes = (4, 6, 5) if len(card) == 15 else (4, 6, 4) if len(card) == 14 else (4, 4, 4, 4)
    groups = [card[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    assert ALL.objection(around.format(separator.join(groups)), "") == "card"


@given(st.sampled_from(CARDS), st.integers(1, 9))
@settings(deadline=None)
def test_a_card_with_a_wrong_digit_is_none(card: str, more: int) -> None:
    wrong = card[:-1] + str((int(card[-1]) + more) % 10)
    assert Redaction(kinds=["card"]).objection(f"{wrong}", "") is None


LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"
ISSUED = {  # of whom: what a token begins with, its characters, how many
    "GitHub": ("ghp_", LETTERS, 36), "GitHub, fine-grained": ("github_pat_", LETTERS + "_", 82),
    "GitHub app": ("ghs_", LETTERS, 36), "GitLab": ("glpat-", LETTERS + "_-", 20),
    "Hugging Face": ("hf_", LETTERS, 34),
    "npm": ("npm_", LETTERS, 36), "PyPI": ("pypi-AgEIcHlwaS5vcmc", LETTERS + "_-", 150),
    "NVIDIA": ("nvapi-", LETTERS + "_-", 64),
    "Stripe": ("sk_live_", LETTERS, 24), "Stripe, restricted": ("rk_test_", LETTERS, 99),
    "webhooks": ("whsec_", LETTERS + "+/", 32),
    "Docker": ("dckr_pat_", LETTERS + "_-", 27), "OpenAI": ("sk-proj-", LETTERS, 48),
    "Anthropic": ("sk-ant-api03-", LETTERS, 95),
    "AWS": ("ASIA", string.ascii_uppercase + "234567", 16), "Google": ("AIza", LETTERS + "_-", 35),
    "Slack": ("xoxb-", string.digits, 24),
    "bearer": ("bearer ", HEX, 32), "long bearer": ("Authorization: Bearer ", HEX, 64),
    "Databricks": ("dapi", HEX, 32),
    "DigitalOcean": ("dop_v1_", HEX, 64), "Shopify": ("shpat_", HEX, 32), "Groq": ("gsk_", LETTERS, 52),
}  # fmt: skip


@given(st.sampled_from(sorted(ISSUED)), st.data())
@settings(deadline=None)
def test_keys_in_the_forms_in_which_they_are_issued(of: str, data: st.DataObject) -> None:
    prefix, alphabet, size = ISSUED[of]
    token = prefix + data.draw(st.text(alphabet, min_size=size, max_size=size).filter(_looks_drawn))
    for text in (token, f'KEY="{token}"', f"use {token}.", f"?key={token}&x"):
        assert ALL.objection(text, "") == "key", of


def _looks_drawn(token: str) -> bool:
    """Letters and a digit among the first sixteen, as drawn ones have, and what generators of tests like has not."""
    return token[:16].isalnum() and any(char.isdigit() for char in token[:16])


def numbers(region: str) -> list[phonenumbers.PhoneNumber]:
    kinds = (PhoneNumberType.FIXED_LINE, PhoneNumberType.MOBILE)
    found = [phonenumbers.example_number_for_type(region, kind) for kind in kinds]
    return [number for number in found if number is not None]


@pytest.mark.parametrize("region", PHONE_REGIONS)
def test_the_numbers_of_a_region(region: str) -> None:
    for number in numbers(region):
        for form in (PhoneNumberFormat.INTERNATIONAL, PhoneNumberFormat.E164):
            assert ALL.objection(f"It is {phonenumbers.format_number(number, form)}.", "")
        national = phonenumbers.format_number(number, PhoneNumberFormat.NATIONAL)
        assert ALL.objection(f"My phone number is {national}.", "")
        assert ALL.objection(f"Tel. {re.sub('[^0-9]', '', national)}", "")


def test_numbers_of_anywhere_with_a_plus() -> None:
    for region in phonenumbers.SUPPORTED_REGIONS:
        for number in numbers(region):
            assert ALL.objection(phonenumbers.format_number(number, PhoneNumberFormat.INTERNATIONAL), "")


def test_regions_are_chosen() -> None:
    assert Redaction(phone_regions=["US"]).objection("020 7946 0958", "") is None
    assert Redaction(phone_regions=["GB"]).objection("555-010-9999", "") is None
    assert Redaction(phone_regions=[]).objection("020 7946 0958", "") is None
    assert Redaction(phone_regions=[]).objection("+44 20 7946 0958", "") == "phone"
    with pytest.raises(ValueError, match="phone region UK, XX: not known"):
        Redaction(phone_regions=["UK", "GB", "XX"])


NAMED = {  # module of stdnum: what people call the number
    "us.itin": "ITIN", "ca.sin": "social insurance number", "br.cpf": "CPF", "ar.cuit": "CUIT", "cl.rut": "RUT",
    "gb.nhs": "NHS number", "ie.pps": "PPS", "at.vnr": "SVNR", "nl.bsn": "BSN", "pt.nif": "NIF", "dk.cpr": "CPR",
    "pl.pesel": "PESEL", "ro.cnp": "CNP", "bg.egn": "ЕГН", "hr.oib": "OIB", "ee.ik": "isikukood",
    "lt.asmens": "asmens kodas",
    "tr.tckimlik": "TC kimlik no", "za.idnr": "ID number", "in_.pan": "PAN", "jp.in_": "マイナンバー",
    "th.pin": "Thai ID",
    "id.nik": "NIK", "il.idnr": "teudat zehut", "au.tfn": "TFN", "nz.ird": "IRD", "es.dni": "", "es.nie": "",
    "fr.nir": "",
    "de.idnr": "", "be.nn": "", "ch.ssn": "", "it.codicefiscale": "", "mx.curp": "", "se.personnummer": "",
    "fi.hetu": "",
    "no.fodselsnummer": "", "kr.rrn": "", "cn.ric": "", "my.nric": "", "pk.cnic": "", "is_.kennitala": "",
}  # fmt: skip


@pytest.mark.parametrize("module", NAMED)
def test_the_examples_of_national_numbers(module: str) -> None:
    text = import_module(f"stdnum.{module}").__doc__ or ""
    examples = re.findall(r">>> validate\('([^']+)'\)(?:  #.*)?\n *'", text)
    assert examples
    for example in (example for example in examples if example != "00743110157"):  # of a company
        assert ALL.objection(f"My {NAMED[module]} number is {example}, thanks", "") == "national_id"


@given(
    st.lists(
        st.sampled_from(
            [*"0123456789", "-", " ", ".", "/", "+", "(", "X", "SSN ", "DE", "²", "٣", "\u00a0", "\ud800"]
        )
    )
)
@settings(deadline=None)
def test_no_digits_are_too_odd(parts: list[str]) -> None:
    assert ALL.objection("".join(parts), "") in (*KINDS, None)


@pytest.mark.parametrize("part", ["a", "1-", "sk-", "AB12 "])
def test_a_long_text_takes_time_in_proportion(part: str) -> None:
    """Where time grows as the square of the length, this runs into the limit of all tests."""
    ALL.objection(part * (2**19 // len(part)), "")


def test_patterns_of_ones_own_and_what_is_not_known() -> None:
    assert Redaction(own={"ticket": r"TCK-\d+"}).objection("", "see TCK-42") == "ticket"
    with pytest.raises(ValueError, match="ticket = \\(: is not a regular expression"):
        Redaction(own={"ticket": "("})
    with pytest.raises(ValueError, match="poem: not known"):
        Redaction(kinds=["poem"])


@pytest.mark.parametrize(
    ("kind", "module"), [("phone", "phonenumbers"), ("card", "stdnum"), ("national_id", "stdnum")]
)
def test_a_distribution_that_is_missing_is_told_when_the_cache_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    open_cache(CacheSettings(redaction={"kinds": ["e-mail", "key"]}), tmp_path / "cache.db").close()
    with pytest.raises(CacheSetupError, match=rf"redaction: .*{module}.*pip install .*\[cache\]'"):
        open_cache(CacheSettings(redaction={"kinds": [kind]}), tmp_path / "cache.db")
