"""What a certificate request must be, before anybody signs it."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding

from dips.errors import Denied
from dips.identity.certificates import make_request, new_key, read_requested_key
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
