"""Configurations of HAProxy: Ray Serve's with edits, and one for the time before Serve has routes.

Ray Serve generates the whole file from a template without hooks. This module keeps the routes and
servers in the file. It edits lines that no setting of Ray Serve controls, and finds them by
pattern. A pattern without a match raises UnknownTemplate, because a new version of Ray may have
changed the lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.errors import ServeError
from deployments.grpc_status import HEALTH_CALLS, STATUS_HEADER
from deployments.request_headers import (
    ADDRESS_HEADER,
    ARRIVAL_HEADER,
    GRPC_TIMEOUT_HEADER,
    KEY_HEADERS,
    OPTION_HEADERS,
    REFUSAL_HEADER,
    SDK_TIMEOUT_HEADERS,
)

_MAX_SCRAPES = 64  # maximum connections of the metrics port, which has no limit per address
METRICS_HOST = "127.0.0.1"  # default; `hundredfold serve --metrics-host` replaces it
HAPROXY_METRICS_PATH = "/haproxy"  # HAProxy's own metrics, on the metrics port
# Requests are similar if they have the same client address, path and values of these headers. If
# the ingress has just refused a request because of a long queue, it would refuse most similar
# requests. It may accept those whose bodies name another model or have another size.
_DECISIVE_HEADERS = (*KEY_HEADERS, ADDRESS_HEADER, *OPTION_HEADERS, *SDK_TIMEOUT_HEADERS)
# Clients of gRPC send the time that is left, which differs between calls: `4999213u`. Its first
# digit, its length and its unit are alike in similar calls.
_GRPC_TIMEOUT = "|".join(
    f"%[req.fhdr({GRPC_TIMEOUT_HEADER}),{form}]"
    for form in ("bytes(0,1)", "length", "regsub([0-9]+,)")
)
# Table of the POST requests in flight, by backend.
_REQUESTS = """
backend requests
    stick-table type string len 64 size 64 expire 1h store conn_cur
"""
# Table of similar requests. The key is a digest of address, path and headers, because the headers
# include API keys. An entry counts requests in flight, refusals in the last second, and refusals in
# the last five seconds. It also stores the last `Retry-After` and the limit on requests in flight.
_REFUSALS = """
backend refusals
    stick-table type binary len 20 size 64k expire 10s store \
gpc0_rate(1s),gpc1_rate(5s),conn_cur,gpt(2)
"""
# After a restart, a proxy or replica of Serve may not know the application's route yet. It answers
# 404, and the body mentions `/-/routes`. HAProxy, which knows the route, sends 503 instead, so that
# clients retry.
_RETRY_UNROUTED = """\
    http-response wait-for-body time 1s if { status 404 }
    http-response deny deny_status 503 if { status 404 } { res.body -m sub /-/routes }
"""
# A node that is lost, such as by a cut in the network, closes no connection. After 10 s without
# data or keepalives, HAProxy repeats its requests on another node. They would wait for 180 s.
_LOST_NODE_S = 10
_PROBE_NODES = """\
    option srvtcpka
    srvtcpka-idle 4s
    srvtcpka-intvl 2s
    srvtcpka-cnt 3
"""
# Counts of a frontend per client. IPv6 clients count by /64 network, because one host owns all
# addresses of such a network. IPv4 clients, whose addresses are in ::ffff:0:0/96, count by address.
CLIENT_TABLE = """\
    stick-table type ipv6 size 64k expire 60s store conn_cur
    tcp-request connection set-var(sess.client) src,ipmask(32,64)
    tcp-request connection set-var(sess.client) src if { src ::ffff:0:0/96 }
"""
# Sets the arrival time of the whole request, or of the first part of a long body (Unix time in ms).
_SET_ARRIVAL = f"    http-request set-header {ARRIVAL_HEADER} %[date(0,ms)]\n"


class UnknownTemplate(ServeError):
    """Ray Serve's configuration lacks a line that must be edited."""

    code = "unknown_template"


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on slow or greedy clients."""

    # Open connections per client address (IPv6: per /64 network). Not limited on Kubernetes.
    connections: int = 2048
    # POST requests in flight per ingress replica. A busy replica would not read further requests.
    # They would wait in its sockets without priorities, even if their clients have disconnected.
    requests: int = 512
    # Up to this many refusals of similar requests per second, HAProxy lets single requests through,
    # to test whether the ingress accepts more. A refusal costs about 1 ms of CPU time in the
    # ingress and nearly none in HAProxy. Not used on Kubernetes.
    refusals: int = 20
    head_s: float = 10.0  # time limit for a request's head, including the wait for its first byte
    # Time limit for a body up to 15 KB, or for the first 15 KB of a longer body. The ingress then
    # gets the request and limits the time for the rest of the body.
    body_s: float = 20.0


@dataclass(frozen=True, slots=True)
class EdgePaths:
    """Files and sockets of one HAProxy process."""

    listener_fd: int  # file descriptor of the inherited listening socket
    admin_socket: Path
    errors: Mapping[int, Path]  # error file by status, from `write_errors`
    certificate: Path | None = None  # PEM file with key and chain; None: HTTP without TLS


def has_routes(text: str) -> bool:
    """Return whether Ray Serve's configuration `text` sends requests to an application."""
    return "\n    use_backend " in text


def find_admin_socket(text: str) -> Path:
    """Return where Ray Serve expects HAProxy's admin socket. Raises UnknownTemplate."""
    found = re.search(r"^    stats socket (\S+) ", text, re.MULTILINE)
    if found is None:
        raise UnknownTemplate("Ray Serve's HAProxy configuration has no line `stats socket`")
    return Path(found[1])


def find_state_file(text: str) -> Path | None:
    """Return the file from which HAProxy takes the state of its servers; None without routes."""
    found = re.search(r"^    server-state-file (\S+)$", text, re.MULTILINE)
    return None if found is None else Path(found[1])


def edit(text: str, errors: Mapping[int, Path], limits: ClientLimits) -> str:
    """Return Ray Serve's configuration with JSON errors and limits.

    A node has no backends of applications until the first one is deployed. Raises UnknownTemplate
    if a line to edit is missing.
    """
    edits = [
        (r"^    errorfile .*\n", ""),
        (r"^defaults\n    mode http\n", "defaults\n    mode http\n" + _defaults(limits)),
        (r"^(frontend http_frontend\n    bind .*\n)", r"\1" + build_client_rules(limits)),
        # Not in the defaults: a backend serves frontends of HTTP and of gRPC, and its errors take
        # the form of the frontend.
        (r"^(?:frontend|listen) \S+\n +bind .*\n", r"\g<0>" + build_error_files(errors)),
        (r"^    http-request return status 404 .*\n", build_denial("")),
    ]
    if has_routes(text):
        rules = _limit_requests(limits.requests) + _RETRY_UNROUTED + _PROBE_NODES
        edits.append((r"^backend (?!default_backend\n)\S+\n", r"\g<0>" + rules))
    edited = _apply(edits, text) + _REQUESTS
    # `default-server` does not hand `tcp-ut` down. It bounds the wait for data that was sent.
    return re.sub(r"^    server .*", rf"\g<0> tcp-ut {_LOST_NODE_S}s", edited, flags=re.MULTILINE)


def edit_for_host(
    text: str, paths: EdgePaths, limits: ClientLimits, metrics_host: str = METRICS_HOST
) -> str:
    """Adapt Ray Serve's configuration to the edge of a host, then apply `edit`.

    HAProxy inherits the listening socket for clients. The metrics port is on `metrics_host`, and
    all other ports are on loopback. The admin socket is private. The metrics port serves the
    applications' metrics, and HAProxy's own metrics at HAPROXY_METRICS_PATH. HAProxy checks no API
    keys there: every host that can connect may read all metrics. Metrics contain no content of
    requests. Raises UnknownTemplate if a line to edit is missing.
    """
    host = f"[{metrics_host}]" if ":" in metrics_host else metrics_host
    metrics = find_metrics_paths(text)
    edits = (
        # No program receives HAProxy's log on this host; the ingress counts and logs requests.
        (r"^    log \S+ local0 info\n", ""),
        (r"^    stats socket .*\n", _admin_socket(paths)),
        (
            r"^(frontend prometheus\n)    bind :(\d+)\n",
            rf"\1    bind {host}:\2\n    maxconn {_MAX_SCRAPES}\n",
        ),
        (r"prometheus-exporter if { path /metrics }\n", _metrics_rules(text, metrics)),
        (r"^  bind \*:(\d+)\n", r"  bind 127.0.0.1:\1\n"),
        (
            r"^frontend http_frontend\n    bind \S+\n",
            # Clients must not read metrics. The ingress decodes the path, merges slashes and
            # ignores those at its end (`route_path`), so the rule does so too.
            _frontend(paths, limits)
            + build_denial(f"if {{ path,url_dec,regsub(//+,/,g),rtrim(/) {metrics} }}"),
        ),
        (
            r"^backend (?!default_backend\n)\S+\n",
            r"\g<0>" + _limit_refusals(limits.refusals) + _SET_ARRIVAL,
        ),
    )
    return edit(_apply(edits, text), paths.errors, limits) + _REFUSALS


def _apply(edits: Iterable[tuple[str, str]], text: str) -> str:
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count == 0:
            raise UnknownTemplate(
                f"Ray Serve's HAProxy configuration has no line that matches `{pattern}`; "
                "this version of Ray is not supported"
            )
    return text


def find_metrics_paths(text: str) -> str:
    """Return the paths of all applications' metrics in one line. Raises UnknownTemplate."""
    prefixes = re.findall(r"^    acl is_\S+ path (\S+)$", text, re.MULTILINE)
    if not prefixes:
        raise UnknownTemplate("Ray Serve's HAProxy configuration has no line `acl is_… path`")
    return " ".join(f"{prefix.rstrip('/')}/metrics" for prefix in prefixes)


def _metrics_rules(text: str, metrics: str) -> str:
    """Build the rules of the metrics port.

    The port returns HAProxy's own metrics at HAPROXY_METRICS_PATH, routes the paths in `metrics`,
    and denies all others.
    """
    own = f"prometheus-exporter if {{ path {HAPROXY_METRICS_PATH} }}\n"
    return own + build_denial(f"unless {{ path {metrics} }}") + find_routes(text)


def find_routes(text: str) -> str:
    """Return the lines of Ray Serve's configuration that choose a backend by the path."""
    routes = re.findall(r"^    acl is_\S+ path.*\n", text, re.MULTILINE)
    return "".join(routes + re.findall(r"^    use_backend .*\n", text, re.MULTILINE))


def _limit_requests(requests: int) -> str:
    """Build the limits of a backend on requests in flight: in total, and per client address.

    A full backend refuses all POST requests except HEALTH_CALLS. A backend that is more than three
    quarters full refuses those of a client address that has more connections than three quarters of
    the total limit. Each host counts its own connections only. On Kubernetes, HAProxy counts no
    connections per address, so only the total limit applies. A backend without servers returns 503
    instead of 429.
    """
    # Health checks pass, or load balancers would remove a busy server. Those of HTTP are GETs.
    limited = f"METH_POST !{{ path {' '.join(HEALTH_CALLS)} }}"
    deny = f"    http-request deny deny_status 429 if {limited} {{ nbsrv gt 0 }}"
    return (
        # `be_conn` would also count requests that are never refused.
        f"    http-request track-sc2 be_name table requests if {limited}\n"
        f"    http-request set-var(txn.max_requests) nbsrv,mul({requests})\n"
        "    http-request set-var(txn.max_share) var(txn.max_requests),mul(3),div(4)\n"
        f"{deny} {{ sc2_conn_cur,sub(txn.max_requests) gt 0 }}\n"
        f"{deny} {{ sc2_conn_cur,sub(txn.max_share) gt 0 }}"
        " { sc0_conn_cur,sub(txn.max_share) gt 0 }\n"
    )


def _limit_refusals(refusals: int) -> str:
    """Build the rules of a backend that limit similar requests after refusals by the ingress.

    The ingress marks its refusals with REFUSAL_HEADER. A marked refusal sets the limit of similar
    requests in flight to the number that the ingress had accepted at that time. The limit applies
    for five seconds after the last marked refusal. The rate of marked refusals per second decides
    how strictly it applies:

    - Above `refusals`, HAProxy allows exactly the limit.
    - Up to `refusals`, it allows one more request, to test whether the ingress accepts more now.
    - Up to a quarter of `refusals`, it also raises the limit. While the limit is reached, one of
      four successful answers on average adds 1 to it. Without this rise, requests would come in a
      burst when the limit ends.

    HAProxy's own refusals carry the last `Retry-After` of the ingress in place of RETRY_AFTER_S.
    """
    headers = (f"%[req.fhdr({name})]" for name in _DECISIVE_HEADERS)
    similar = "|".join(("%[var(sess.client)]", "%[path]", *headers, _GRPC_TIMEOUT))
    marked = f"{{ res.fhdr({REFUSAL_HEADER}) -m found }}"
    repeated = "{ var(txn.repeated) -m bool }"
    # The limit counts the refused request, and sc1_conn_cur the new one. Equal numbers mean that as
    # many other requests are in flight as the ingress had accepted at the refusal.
    is_full = "{ sc1_conn_cur,sub(txn.limit) ge 0 }"
    is_above = "{ sc1_conn_cur,sub(txn.limit) gt 0 }"
    applies = "{ sc1_gpc1_rate gt 0 }"
    is_rare = f"{{ sc1_gpc0_rate le {refusals // 4} }}"
    return (
        f'    http-request set-var-fmt(txn.similar) "{similar}"\n'
        "    http-request track-sc1 var(txn.similar),sha1 table refusals if METH_POST\n"
        "    http-request set-var(txn.limit) sc_get_gpt(1,1)\n"
        "    http-request set-var(txn.repeated) bool(true)"
        f" if {is_full} {{ sc1_gpc0_rate gt {refusals} }}\n"
        "    http-request set-var(txn.repeated) bool(true)"
        f" if {is_above} {applies}\n"
        f"    http-request deny deny_status 429 if {repeated}\n"
        "    http-response set-var(txn.limit) sc_get_gpt(1,1)\n"
        "    http-response sc-set-gpt(1,1) var(txn.limit),add(1)"
        f" if {{ status 200 }} {is_full} {applies} {is_rare} {{ rand(4) eq 0 }}"
        f" !{{ res.fhdr({STATUS_HEADER}) -m found }}\n"  # errors of gRPC have 200 too
        f"    http-response sc-inc-gpc0(1) if {marked}\n"
        f"    http-response sc-inc-gpc1(1) if {marked}\n"
        f"    http-response sc-set-gpt(0,1) res.fhdr(retry-after) if {marked}\n"
        f"    http-response sc-set-gpt(1,1) sc1_conn_cur if {marked}\n"
        f"    http-response del-header {REFUSAL_HEADER}\n"
        "    http-after-response set-header retry-after %[sc_get_gpt(0,1)]"
        f" if {repeated} {{ sc_get_gpt(0,1) gt 0 }}\n"
    )


def build_denial(condition: str) -> str:
    return f"    http-request deny deny_status 404 {condition}".rstrip() + "\n"


def build_starting_config(paths: EdgePaths, limits: ClientLimits) -> str:
    """Build the configuration for the time before Ray Serve has routes: all requests get 503."""
    return (
        f"global\n{_admin_socket(paths)}"
        "    maxconn 4096\n    nbthread 1\n    hard-stop-after 5s\n"
        f"defaults\n    mode http\n{_defaults(limits)}"
        "    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n"
        f"{_frontend(paths, limits)}{build_error_files(paths.errors)}"
        "    default_backend starting\n"
        "backend starting\n"
    )


def _admin_socket(paths: EdgePaths) -> str:
    return f"    stats socket {paths.admin_socket} mode 600 level admin\n"


def _defaults(limits: ClientLimits) -> str:
    return (
        # Over HTTP/2, one connection would carry a hundred requests and so evade ClientLimits.
        f"    option disable-h2-upgrade\n    timeout http-request {_ms(limits.head_s)}\n"
    )


def build_error_files(errors: Mapping[int, Path]) -> str:
    return "".join(f"    errorfile {status} {path}\n" for status, path in errors.items())


def _frontend(paths: EdgePaths, limits: ClientLimits) -> str:
    return (
        "frontend http_frontend\n"
        f"    bind fd@{paths.listener_fd}{build_tls_options(paths.certificate, 'http/1.1')}\n"
        f"{CLIENT_TABLE}"
        "    tcp-request connection track-sc0 var(sess.client)\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {limits.connections} }}\n"
    )


def build_tls_options(certificate: Path | None, protocol: str) -> str:
    """Build the options of a `bind` line. By default HAProxy would offer both versions of HTTP."""
    if certificate is None:
        return ""
    return f" ssl crt {certificate} alpn {protocol} ssl-min-ver TLSv1.2"


def build_client_rules(limits: ClientLimits) -> str:
    return (
        "    http-request set-header x-forwarded-proto https if { ssl_fc }\n"
        "    option forwardfor\n"  # sends the address of the client to the ingress
        # Turns off Serve's own timeout, `http_options.request_timeout_s`, and its detection of
        # disconnected clients, even if a client sends these headers. The ingress has both features
        # itself. Serve's detection costs 35 µs per request.
        "    http-request set-header x-request-disconnect-disabled ?1\n"
        "    http-request set-header x-request-timeout-seconds 0\n"
        f"    http-request wait-for-body time {_ms(limits.body_s)} if METH_POST\n"
        # Does not repeat a rollback, because a second rollback would go back another version.
        "    http-request disable-l7-retry if { path,url_dec,rtrim(/) -m end /rollback }\n"
    )


def _ms(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
