"""The page and the metrics: who may ask, what is answered, what a real browser shows."""

import asyncio
import json
import socket
import subprocess
import urllib.error
import urllib.request

import pytest
from browser import BROWSER, needs_browser, shown
from refusals import refused
from strangers import REFUSED, STAYING, Attack
from synthetic import news_of, records_of, view_of

web = pytest.importorskip("rpc_pipe.dispatch.web")

from rpc_pipe.boards.view import View  # noqa: E402
from rpc_pipe.dispatch import watcher  # noqa: E402
from rpc_pipe.dispatch.rows import draw_steps, whole_state  # noqa: E402
from rpc_pipe.drawing.svg import draw_page, fill_page  # noqa: E402
from rpc_pipe.planning.specs import make_spec  # noqa: E402


class Source:
    name, over = "run-1", False


def ask(address, **headers):
    """Return (status, text, headers)."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def served(view, use, host="127.0.0.1", page=True):
    """Return `use(address)`, called in a thread while the view is served."""

    async def main():
        server = web.Server(view, Source(), "--web", host, 0, page=page)
        address = await server.start()
        try:
            return await asyncio.to_thread(use, address)
        finally:
            await server.stop()

    return asyncio.run(main())


def test_the_state_is_everything_that_is_known():
    status, text, _ = served(view_of(), lambda at: ask(f"{at}state?steps=2"))
    state = json.loads(text)
    assert status == 200 and state["step"] == 3 and len(state["workers"]) == 4 and len(state["links"]) == 6
    assert state["lost"]["sentence"] and state["losses"][-1] == [3, pytest.approx(2.7)]
    planned, actual = (drawn.split("</svg>")[0] for drawn in state["pictures"].split("<svg ")[1:])
    assert planned.count("<title>") == actual.count("<title>") == 2 * 4 * 17

    def again(at):
        return json.loads(ask(f"{at}state?steps=2&have=3/2/4&after=2")[1])

    state = served(view_of(), again)
    assert "pictures" not in state and [point[0] for point in state["losses"]] == [3]


def test_an_empty_run_is_answered_too():
    state = json.loads(served(View(), lambda at: ask(f"{at}state"))[1])
    assert state["workers"] == [] and state["step"] is None and state["lost"] is None


def test_only_our_own_page_on_our_own_address_may_ask():
    def use(at):
        port = at.split(":")[-1].strip("/")
        return [
            ask(f"{at}state", Host=f"evil.example:{port}")[0],
            ask(f"{at}state", Host="127.0.0.1:1")[0],
            ask(f"{at}state", Origin="http://evil.example")[0],
            ask(f"{at}state", Origin="null")[0],
            ask(f"{at}state", Origin=f"http://localhost:{port}", Host=f"localhost:{port}")[0],
            ask(f"{at}state?steps=x")[0],
            ask(f"{at}../../etc/passwd")[0],
        ]

    assert served(view_of(), use) == [403, 403, 403, 403, 200, 400, 404]


def test_nothing_can_be_changed_and_nothing_loaded_from_elsewhere():
    def use(at):
        for method in ("POST", "PUT", "DELETE"):
            request = urllib.request.Request(f"{at}state", method=method, data=b"")
            with pytest.raises(urllib.error.HTTPError, match="405"):
                urllib.request.urlopen(request, timeout=10)
        return ask(at)

    status, text, headers = served(view_of(), use)
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "http://" not in text.replace("http-equiv", "") and "https://" not in text


def test_beyond_this_machine_a_token_is_asked_for():
    def use(at):
        bare, token = at.split("?token=")
        bare = bare.replace("0.0.0.0", "127.0.0.1")
        first = ask(f"{bare}?token={token}")
        return [
            ask(f"{bare}state")[0],
            ask(f"{bare}state?token=wrong")[0],
            first[0],
            ask(f"{bare}state", Cookie=first[2]["Set-Cookie"].split(";")[0])[0],
            ask(f"{bare}metrics", Authorization=f"Bearer {token}")[0],
            "HttpOnly" in first[2]["Set-Cookie"],
        ]

    assert served(view_of(), use, host="0.0.0.0") == [401, 401, 200, 200, 200, True]


def test_what_strangers_send_is_refused_in_silence(caplog):
    """For each request that was no HTTP a traceback with all its bytes was printed on the terminal."""

    def use(at):
        attack = Attack(int(at.split(":")[-1].strip("/")), 6 * len(REFUSED + STAYING))
        attack.run()
        answered = ask(at)[0]
        attack.leave()
        return answered, attack.wrong, attack.answers

    answered, wrong, answers = served(view_of(), use)
    assert answered == 200 and not wrong and not caplog.records
    assert {status for _, status in answers} == {0, 400, 403, 404, 405}


def test_who_connects_and_stays_keeps_nobody_out():
    """Nothing bounded the connections: when their descriptors were used up, nobody was answered for an hour."""

    def use(at):
        port = int(at.split(":")[-1].strip("/"))
        stay = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        statuses = {ask(at)[0] for _ in range(3)}
        closed = 0
        for stranger in stay:
            stranger.setblocking(False)
            try:
                closed += stranger.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except BlockingIOError:
                pass
            stranger.close()
        return statuses, closed >= 100 - web._MOST_CONNECTIONS

    assert served(view_of(), use) == ({200}, True)


def test_a_run_that_has_ended_is_told_once_and_its_page_stays(monkeypatch, capsys):
    """`watch --web` into a file repeated its last line every five seconds for ever."""
    monkeypatch.setattr(watcher, "_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(watcher, "_LOOK_EVERY_S", 0.005)
    source = Source()
    spec = make_spec("1f1b", 2, 2, {})
    source.over, source.look = True, lambda: news_of(spec, records_of(spec))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(watcher.Watcher(source, {"web": "0"}).run(), 1))
    lines = capsys.readouterr().out.splitlines()
    assert "step 3" in lines[1] and lines[2] == "run-1 has ended" and len(lines) <= 5, lines


def test_metrics_are_openmetrics_with_units():
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    status, text, headers = served(view_of(), lambda at: ask(at), page=False)
    assert status == 200 and headers["Content-Type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["rpc_pipe_step_seconds"].unit == "seconds"
    assert families["rpc_pipe_steps"].samples[0].value == 3
    assert {s.labels["worker"] for s in families["rpc_pipe_worker_bubble_ratio"].samples} == set("0123")
    assert len(families["rpc_pipe_link_latency_seconds"].samples) == 6
    assert ask_metrics_only()


def ask_metrics_only():
    """Where only metrics were asked for there is no page."""
    return served(View(), lambda at: ask(at.replace("metrics", ""))[0], page=False) == 404


@pytest.mark.parametrize("text", ["", "x", "70000", "host:", "1.2.3.4:x", ":-1", "²", "9" * 5000])
def test_addresses_that_are_none(text):
    with refused("--web"):
        web.parse_address("--web", text)


def test_addresses():
    assert web.parse_address("--web", "8800") == ("127.0.0.1", 8800)
    assert web.parse_address("--web", "[::1]:80") == ("::1", 80)
    assert web.parse_address("--web", "0.0.0.0:80") == ("0.0.0.0", 80)


def test_a_port_that_is_taken_is_told():
    def use(at):
        port = int(at.split(":")[-1].strip("/"))

        async def second():
            await web.Server(View(), Source(), "--web", "127.0.0.1", port, page=True).start()

        with refused("--web"):
            asyncio.run(second())
        return True

    assert served(view_of(), use)


@needs_browser
@pytest.mark.parametrize("view, expected", [
    (lambda: view_of(), ["run-1: 1f1b", "step 3", "actual", "worker", "0 → 1", "bubble", "loss 2.7000"]),
    (View, ["connected to 0 of ? workers of run-1; waiting for them to start"]),
], ids=["running", "empty"])  # fmt: skip
def test_a_browser_shows_it(view, expected, tmp_path):
    def use(at):
        done = subprocess.run(
            [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--no-first-run", "--disable-component-update", "--disable-sync", "--window-size=1200,900",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom", at],
            capture_output=True, text=True, timeout=90, check=True,
        )  # fmt: skip
        return done.stdout

    page = served(view(), use)
    for text in expected:
        assert text in page.replace("<b>", "").replace("</b>", ""), (text, page[-3000:])
    if len(expected) > 1:
        assert page.count("</svg>") == 2


@needs_browser
@pytest.mark.parametrize("log", ["false", "true"])
def test_the_axis_of_the_loss_has_room_for_its_numbers(tmp_path, log):
    """Small losses were cut off at the left, and there was no logarithm."""
    found = shown(fill_page(DATA="{}"), tmp_path, f"""
        byId("grid").hidden = false;
        for (let step = 0; step < 100; step++) losses.push([step, 3e-7 * 0.9 ** step]);
        byId("log").checked = {log};
        drawCurve();
        const canvas = byId("curve"), context = canvas.getContext("2d");
        const inked = column => context.getImageData(column, 0, 1, canvas.height).data.some(value => value > 0);
        report({{marks: canvas.getAttribute("aria-label"), first: inked(0), last: inked(canvas.width - 1)}});
    """)  # fmt: skip
    marks = found["marks"].removeprefix("loss by step; marks at ").split(", ")
    assert marks == (["1e-11", "1e-10", "1e-9", "1e-8", "1e-7"] if log == "true" else ["1e-7", "2e-7", "3e-7"])
    assert not found["first"] and not found["last"]


def test_the_page_of_a_run_that_has_ended_holds_what_the_live_one_asks_for():
    view = view_of()
    state = whole_state(view, "train.py </script>", True)
    page = draw_page(draw_steps(view, 1), state)
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(data) == json.loads(json.dumps(state)) and state["lost"]["sentence"]
    assert page.count("</svg>") == 2 and page.count("</script>") == draw_page([]).count("</script>")
