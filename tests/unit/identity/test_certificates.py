"""What a certificate request must be, before anybody signs it."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID

from dips.errors import ConfigError, Denied
from dips.identity.certificates import (
    CLOCK_SKEW,
    MOST_PEM,
    check_validity,
    ends_soon,
    identity_of,
    make_authority,
    make_request,
    new_key,
    parse_request,
    read_pem,
    read_requested_key,
    signed_at,
)
from dips.identity.names import PeerRole, make_identity


def test_a_request_names_a_key_of_our_kind_and_is_signed_by_it() -> None:
    """Neither alone will do: a stranger's key, and a key that the rest of Di-PS cannot use."""
    identity, key = make_identity("west", PeerRole.CLUSTER, "july"), new_key()
    request = make_request(identity, key)
    assert read_requested_key(request) == key.public_key()
    der = bytearray(request.public_bytes(Encoding.DER))
    der[-1] ^= 1
    strange_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    builder = x509.CertificateSigningRequestBuilder().subject_name(request.subject)
    for wrong in (x509.load_der_x509_csr(bytes(der)), builder.sign(strange_key, hashes.SHA256())):
        with pytest.raises(Denied, match="not signed by the P-256 key that it names"):
            read_requested_key(wrong)


def test_no_flipped_byte_of_a_request_is_more_than_refused(tmp_path: Path) -> None:
    """A key of another kind, or a point on no curve, was a traceback: of `dips certs issue`, and in the log of the
    authority's port, two hundred a second, for whoever has any certificate.
    """
    der = make_request(make_identity("west", PeerRole.CLUSTER, "july"), new_key()).public_bytes(Encoding.DER)
    refused = set[type[Exception]]()
    for place in range(len(der)):
        wrong = b64encode(der[:place] + bytes([der[place] ^ 1]) + der[place + 1 :])
        pem = b"-----BEGIN CERTIFICATE REQUEST-----\n%s\n-----END CERTIFICATE REQUEST-----\n" % wrong
        try:
            read_requested_key(parse_request(pem, tmp_path, "request"))
        except (ConfigError, Denied) as error:
            refused.add(type(error))
    assert refused == {ConfigError, Denied}


def test_a_request_with_a_name_of_an_unknown_kind_is_refused() -> None:
    """`cryptography` has an error of its own for two kinds of names: the authority's port logged a traceback a call."""
    for name in (b"\xa3\x00", b"\xa5\x00"):  # x400Address, ediPartyName
        san = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x02" + name)
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).add_extension(san, critical=False)
        request = builder.sign(new_key(), hashes.SHA256()).public_bytes(Encoding.DER)
        with pytest.raises(Denied, match="expected one name"):
            identity_of(x509.load_der_x509_csr(request))


def test_a_certificate_is_valid_from_its_first_second_to_its_last() -> None:
    """Both ends belong to it; the refusal says which clock or command to look at."""
    begin = datetime(2026, 7, 1, 12, tzinfo=UTC)
    root = make_authority("july", new_key(), begin + CLOCK_SKEW, days=4)
    end, second = root.not_valid_after_utc, timedelta(seconds=1)
    assert root.not_valid_before_utc == begin and signed_at(root) == begin + CLOCK_SKEW
    check_validity(root, begin, "it")
    check_validity(root, end, "it")
    with pytest.raises(ConfigError, match="it is valid from 2026-07-01 12:00 UTC only"):
        check_validity(root, begin - second, "it")
    with pytest.raises(ConfigError, match="it expired at 2026-07-05 12:05 UTC"):
        check_validity(root, end + second, "it")


@pytest.mark.parametrize(("days", "late"), [(4, timedelta(days=1)), (90, timedelta(days=14))])
def test_who_renews_is_late_in_the_last_quarter_or_two_weeks(days: int, late: timedelta) -> None:
    """Whichever is less: a certificate of a day is not late all its life."""
    since = datetime(2026, 7, 1, tzinfo=UTC)
    until = since + timedelta(days=days)
    assert [ends_soon(since, until, until - late + timedelta(seconds=s)) for s in (-1, 0, 1)] == [False, False, True]


def test_a_file_of_certificates_may_be_as_long_as_the_bound(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes(b"x" * MOST_PEM)
    assert read_pem(tmp_path / "ca.crt", "tls") == b"x" * MOST_PEM
