"""The lab's DNS: names of services and of pods behind services without an address, as CoreDNS has
them: from Endpoints, for five seconds, and as long for names that are not there.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
import struct
import sys
import threading
import time

from lab_api import LabApi

DOMAIN = "cluster.local"
TTL_S = 5
"""CoreDNS's, of its plugin `kubernetes`; its cache keeps an answer for as long."""
LOOK_S = 0.5
ADDRESS, NO_NAME, REFUSED = 1, 3, 5
Names = dict[str, list[str]]


def look(api: LabApi) -> Names:
    """Every name of this cluster, with its addresses."""
    names: Names = {}
    headless = set()
    for service in api.items("/api/v1/services"):
        about = service["metadata"]
        name = f"{about['name']}.{about['namespace']}.svc.{DOMAIN}"
        address = service["spec"].get("clusterIP", "None")
        names[name] = [] if address == "None" else [address]
        if address == "None":
            headless.add(name)
    for endpoints in api.items("/api/v1/endpoints"):
        about = endpoints["metadata"]
        name = f"{about['name']}.{about['namespace']}.svc.{DOMAIN}"
        if name not in headless:
            continue
        for subset in endpoints.get("subsets") or []:
            # Those that are not ready are among them when the service wants it.
            for one in subset.get("addresses") or []:
                names[name].append(one["ip"])
                if one.get("hostname"):
                    names.setdefault(f"{one['hostname']}.{name}", []).append(one["ip"])
    return {name: sorted(set(found)) for name, found in names.items()}


class Zone:
    """What is answered: what was known when a name was first asked for, for some seconds."""

    def __init__(self) -> None:
        self._names: Names = {}
        self._answers: dict[str, tuple[float, list[str] | None]] = {}
        self._lock = threading.Lock()

    def renew(self, names: Names) -> None:
        """Answer from these, once the answers of before are too old."""
        with self._lock:
            self._names = names

    def find(self, name: str) -> tuple[list[str] | None, int]:
        """The addresses, None where there is no such name; and for how many seconds that holds."""
        now = time.monotonic()
        with self._lock:
            until, found = self._answers.get(name, (0.0, None))
            if until <= now:
                until, found = now + TTL_S, self._names.get(name)
                self._answers[name] = until, found
        return found, max(1, round(until - now))


def answer(asked: bytes, zone: Zone) -> bytes:
    """The packet that answers this one."""
    number, _, questions = struct.unpack("!HHH", asked[:6])
    if questions != 1:
        return struct.pack("!HHHHHH", number, 0x8180 | REFUSED, 0, 0, 0, 0)
    labels, at = [], 12
    while length := asked[at]:
        labels.append(asked[at + 1 : at + 1 + length].decode("latin-1"))
        at += 1 + length
    (kind,) = struct.unpack("!H", asked[at + 1 : at + 3])
    question = asked[12 : at + 5]
    found, ttl_s = zone.find(".".join(labels).lower())
    code = NO_NAME if found is None else 0
    wanted = found if found and kind == ADDRESS else []
    head = struct.pack("!HHHHHH", number, 0x8580 | code, 1, len(wanted), 0, 0)
    records = [
        b"\xc0\x0c" + struct.pack("!HHIH", ADDRESS, 1, ttl_s, 4) + ipaddress.IPv4Address(one).packed
        for one in wanted
    ]
    return head + question + b"".join(records)


def serve(listen: str, zone: Zone) -> None:
    """Answer until the process ends."""
    host, _, port = listen.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((host, int(port)))
        while True:
            asked, who = server.recvfrom(4096)
            try:
                server.sendto(answer(asked, zone), who)
            except (IndexError, struct.error, OSError) as error:
                sys.stderr.write(f"{who}: {error!r}\n")


def main() -> None:
    """Until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--listen", required=True, help="ADDRESS:PORT")
    given = parser.parse_args()
    api, zone = LabApi(given.kubeconfig), Zone()
    threading.Thread(target=serve, args=(given.listen, zone), daemon=True).start()
    while True:
        try:
            zone.renew(look(api))
        except OSError as error:
            sys.stderr.write(f"{error!r}\n")
        time.sleep(LOOK_S)  # An interval between looks.


if __name__ == "__main__":
    main()
