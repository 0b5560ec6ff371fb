"""moto's S3 with one bucket, as a process: it prints its URL, and serves until its input ends."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import boto3
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer


def main() -> None:
    put_object, lock = S3Response.put_object, threading.Lock()

    def put_one(self: S3Response) -> Any:
        """moto looks whether an object exists, and then makes it: two threads could both make one."""
        with lock:
            return put_object(self)

    S3Response.put_object = put_one  # type: ignore[method-assign]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    given = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **given)
    client.create_bucket(Bucket="bucket")
    print(endpoint, flush=True)
    sys.stdin.read()
    os._exit(0)  # without a wait for its threads


if __name__ == "__main__":
    main()
