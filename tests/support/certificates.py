"""A certificate authority for tests, and its certificates as files."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


class Authority:
    """An authority and its certificates. `path`: its own certificate. Each file with a key has mode 600."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self._ca = folder, trustme.CA()
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def of_server(self, host: str = "127.0.0.1", *, days: int = 1, file: str = "") -> Path:
        """Make the certificate and the key of a server. It expires in `days` days, and is valid from two days before
        that."""
        end = datetime.datetime.now(datetime.UTC) + days * DAY
        issued = self._ca.issue_cert(host, not_before=end - 2 * DAY, not_after=end)
        return self._file(file or f"server-{host}-{days}", issued.private_key_and_cert_chain_pem.bytes())

    def of_user(self, common_name: str, *uris: str) -> Path:
        """Make the certificate and the key of a client."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        authority = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signing = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )
        if uris:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
            certificate = certificate.add_extension(names, critical=False)
        pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        text = certificate.sign(signing, hashes.SHA256()).public_bytes(pem) + key.private_bytes(pem, pkcs8, plain)
        return self._file(f"user-{common_name}", text)

    def _file(self, name: str, text: bytes) -> Path:
        path = self.folder / f"{name}.pem"
        path.touch(0o600)
        path.write_bytes(text)
        return path

    def trusting(self) -> ssl.SSLContext:
        """Return the TLS context of a foreign client that trusts this authority."""
        return ssl.create_default_context(cafile=str(self.path))
