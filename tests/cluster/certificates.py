"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from plancompiler.cluster.channel import TlsFiles

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
SIGNED = {
    "ca": ("server", "client", "elsewhere", "only_server", "only_client", "expired"),
    "other": ("stranger",),
}
"""Certificates by the authority that signs them."""
USES = {"only_server": "serverAuth", "only_client": "clientAuth"}
"""What a certificate is for, where it is not for everything."""


def make_certificates(folder: Path) -> None:
    """Pairs of key and certificate; all are of this machine, but for that of `elsewhere`."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for authority, names in SIGNED.items():
        openssl("req", "-x509", *CURVE, "-subj", f"/CN={authority}", "-days", "2",
                "-keyout", f"{authority}.key", "-out", f"{authority}.pem")  # fmt: skip
        for name in names:
            host = "DNS:elsewhere" if name == "elsewhere" else "IP:127.0.0.1,DNS:localhost"
            use = f"\nextendedKeyUsage={USES[name]}" if name in USES else ""
            (folder / "san.txt").write_text(f"subjectAltName={host}{use}")
            days = "-1" if name == "expired" else "2"
            openssl("req", *CURVE, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                    "-out", f"{name}.csr")  # fmt: skip
            openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem",
                    "-CAkey", f"{authority}.key", "-days", days, "-extfile", "san.txt",
                    "-out", f"{name}.pem")  # fmt: skip


def tls(folder: Path, name: str, authority: str = "ca") -> TlsFiles:
    """The files of someone who trusts what the authority has signed."""
    return TlsFiles(folder / f"{authority}.pem", folder / f"{name}.pem", folder / f"{name}.key")
