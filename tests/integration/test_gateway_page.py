"""The gateway's page in a browser: a chat, both runs, the live tree, a lost server; sizes, schemes and the keyboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coppice.core.tree import TokenTree
from tests.browser import Browser, Page, browsing, installed
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeDrafter, FakeVerifier
from tests.faults.deployment import free_port
from tests.http_client import gateway_to
from tests.integration.test_tokens import tenants
from tests.toy_target import babble, plain

pytestmark = [
    pytest.mark.skipif(not installed(), reason="there is no Chromium"),
    pytest.mark.timeout(240),
]
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
FIGURES = "document.querySelector('.message .figures')?.textContent"


def bushy(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
    """Two tokens that are right, one that is wrong, and a wrong child of the root; then two, likely to be cut."""
    right = plain(babble, tokens, 2, seed)
    wrong = [(token + 1) % 256 for token in (*right, 0, 0, 0)]
    return TokenTree(
        (right[0], right[1], wrong[2], wrong[0], wrong[3], wrong[4]),
        (-1, 0, 1, -1, 3, 4),
        (-0.1, -0.1, -0.1, -1.0, -3.0, -3.0),
    )


@contextlib.asynccontextmanager
async def page_of(
    verifier: FakeVerifier, width: int = 1400, scheme: str = "light", **settings: Any
) -> AsyncIterator[tuple[Browser, Page, str]]:
    """A browser, a page whose server is ready, and its address."""
    async with contextlib.AsyncExitStack() as stack:
        _, one = await stack.enter_async_context(orchestrator_on_fakes(verifier, FakeDrafter(bushy), **settings))
        address = await stack.enter_async_context(gateway_to(one.address))
        browser = await stack.enter_async_context(browsing())
        page = await browser.open(f"http://{address}/", width=width, scheme=scheme)
        await page.until("document.getElementById('model').textContent === 'toy'")
        yield browser, page, address
        assert page.problems == []
        assert all(url.startswith((f"http://{address}/", "data:")) for url in page.requests)


async def text_of(page: Page, place: str) -> str:
    text: str = await page.evaluate(f"document.querySelector({place!r}).textContent")
    return text


async def ask(page: Page, text: str) -> None:
    """Ask in the chat, and wait for the end of the answer."""
    await page.evaluate("document.getElementById('question').focus()")
    await page.type(text)
    await page.press("Enter")
    await page.until(FIGURES)


async def test_a_chat_with_the_keyboard_alone() -> None:
    async with page_of(FakeVerifier(chat_template=TEMPLATE)) as (_, page, _):
        await ask(page, "hi")
        said = await text_of(page, ".message.assistant > span")
        assert said == bytes(plain(babble, b"user: hi\nassistant:", 128, 1)).decode()
        assert (await text_of(page, ".message .figures")).startswith("128 tokens, ")
        assert await text_of(page, ".message.user") == "hi"
        # The focus is still where the next message is written.
        await page.type("and then?")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.message .figures')[1]?.textContent")
        assert await page.evaluate("document.querySelectorAll('.message').length") == 4


async def test_an_answer_can_be_stopped() -> None:
    async with page_of(FakeVerifier(chat_template=TEMPLATE, pass_s=0.2)) as (_, page, _):
        await page.evaluate("document.getElementById('question').focus()")
        await page.type("hi")
        await page.press("Enter")
        await page.until("document.querySelector('.message.assistant > span')?.textContent")
        await page.press("Escape")
        assert await page.until(FIGURES) == "stopped"
        assert await page.evaluate("document.getElementById('send').disabled") is False


async def test_a_model_without_a_template_completes_text() -> None:
    async with page_of(FakeVerifier()) as (_, page, _):
        await ask(page, "def ")
        said = await text_of(page, ".message.assistant > span")
        assert said == bytes(plain(babble, b"def ", 128, 1)).decode()


async def test_both_runs_are_identical_and_share_no_memory() -> None:
    verifier = FakeVerifier(chat_template=TEMPLATE)
    async with page_of(verifier) as (_, page, _):
        await page.evaluate("document.getElementById('tab-chat').focus()")
        await page.press("ArrowRight")
        assert await page.evaluate("document.activeElement.id") == "tab-compare"
        await page.evaluate("document.getElementById('prompt').focus()")
        await page.type("hi")
        await page.press("Tab")
        await page.press("Enter")
        verdict = await page.until("document.getElementById('verdict').textContent")
        assert verdict.startswith("Identical: 128 of 128 tokens. ")
        assert await text_of(page, "#off pre") == await text_of(page, "#on pre")
        assert "in 128 rounds, τ\xa01.00" in await text_of(page, "#off .figures")
        assert "in 128 rounds" not in await text_of(page, "#on .figures")
        assert "Nothing was drafted" not in verdict
    assert len({opening.cache_salt for opening in verifier.opened}) == 2


async def test_runs_without_drafts_say_so() -> None:
    verifier = FakeVerifier(chat_template=TEMPLATE)
    # A planner for which drafts do not pay: it has no nodes to spend.
    async with page_of(verifier, max_nodes=0) as (_, page, _):
        await page.evaluate("document.getElementById('tab-compare').click()")
        await page.evaluate("document.getElementById('prompt').focus()")
        await page.type("hi")
        await page.evaluate("document.getElementById('go').click()")
        assert "Nothing was drafted" in await page.until("document.getElementById('verdict').textContent")


async def test_both_runs_ask_for_the_same_but_for_speculation() -> None:
    async with page_of(FakeVerifier(chat_template=TEMPLATE)) as (_, page, _):
        await page.evaluate("document.getElementById('tab-compare').click()")
        await page.evaluate("document.getElementById('forced').click()")
        await page.evaluate("document.querySelector('[name=seed]').value = '5'")
        await page.evaluate(
            "window.sent = [], window.old = fetch, "
            "window.fetch = (path, more) => "
            "(path.startsWith('/v1/c') && sent.push(JSON.parse(more.body)), old(path, more))"
        )
        await page.evaluate("document.getElementById('prompt').focus()")
        await page.type("hi")
        await page.evaluate("document.getElementById('go').click()")
        await page.until("document.getElementById('verdict').textContent")
        off, on = await page.evaluate("sent")
    assert (off.pop("speculation"), on.pop("speculation")) == ({"mode": "off"}, {"mode": "forced"})
    assert off.pop("cache_salt") != on.pop("cache_salt")
    assert off == on
    assert off["seed"] == 5


async def test_runs_that_differ_are_said_to() -> None:
    verifier = FakeVerifier(chat_template=TEMPLATE)
    # The second request's tokens are others from the eleventh on.
    prompt = len("user: hi\nassistant:")
    verifier.target = lambda tokens, seed: babble(
        tokens, seed + (len(verifier.opened) > 1 and len(tokens) >= prompt + 10)
    )
    async with page_of(verifier) as (_, page, _):
        await page.evaluate("document.getElementById('tab-compare').click()")
        await page.evaluate("document.getElementById('prompt').focus()")
        await page.type("hi")
        await page.evaluate("document.getElementById('go').click()")
        verdict = await page.until("document.getElementById('verdict').textContent")
        assert verdict.startswith("Different from token 11 on. ")


async def test_the_live_tree_has_every_state_and_source() -> None:
    verifier = FakeVerifier(chat_template=TEMPLATE, reroots=True, pass_s=0.01)
    async with page_of(verifier, watch_rounds=True, max_nodes=4, linger_ms=5000.0) as (browser, page, address):
        await page.evaluate("document.getElementById('tab-live').click()")
        await page.until("document.getElementById('t-running').textContent === '0'")
        other = await browser.open(f"http://{address}/")
        await other.until("document.getElementById('model').textContent === 'toy'")
        await ask(other, "hi")
        for state in ("accepted", "target", "rejected", "pruned"):
            await page.until(f"[...document.querySelectorAll('#rounds [role=option]')].some(one => (one.click(), "
                             f"document.querySelector('#tree .node.{state}')))")  # fmt: skip
        assert await page.evaluate("document.querySelector('#tree svg').getAttribute('aria-label')")
        # Edges have a beginning in common: those of kept tokens are drawn over the others.
        edges = await page.evaluate("[...document.querySelectorAll('#tree .edge')].map(one => one.classList[1])")
        kept = [state in ("accepted", "target") for state in edges]
        assert kept == sorted(kept)
        assert len(set(kept)) == 2
        assert "small-lm" in await text_of(page, "#legend")
        assert "accepted" in await text_of(page, "#round-line")
        # A choice has stopped the drawing; arrows go on from there.
        assert await text_of(page, "#pause") == "Go on"
        await page.evaluate("document.getElementById('rounds').focus()")
        await page.press("ArrowLeft")
        assert await page.evaluate("document.querySelectorAll('#rounds [aria-selected=true]').length") == 1
        await page.evaluate("document.getElementById('as-table').open = true")
        await page.until("document.querySelectorAll('#as-table tbody tr').length >= 3")
        assert await page.until("document.querySelector('#speed .line').getAttribute('d')")


async def test_a_live_view_that_is_off_says_so() -> None:
    async with page_of(FakeVerifier()) as (_, page, _):
        await page.evaluate("document.getElementById('tab-live').click()")
        assert "WATCH_ROUNDS=on" in await page.until("document.getElementById('live-note').textContent")
        # The refusal is in the log of the network, where no policy was broken.
        assert page.problems == []


async def test_a_token_is_asked_for_and_used(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(tenants(alice={}))
    verifier = FakeVerifier(chat_template=TEMPLATE)
    settings = {"tokens_file": str(tmp_path / "tokens"), "watch_rounds": True}
    async with (
        orchestrator_on_fakes(verifier, **settings) as (_, one),
        gateway_to(one.address) as address,
        browsing() as browser,
    ):
        page = await browser.open(f"http://{address}/#live")
        wants = "This server wants a bearer token: see Settings."
        await page.until(f"document.getElementById('model').textContent === '{wants}'")
        assert await page.until("document.getElementById('live-note').textContent") == wants
        await page.evaluate("document.getElementById('settings-toggle').click()")
        await page.evaluate("document.querySelector('[name=token]').focus()")
        await page.type("alice!")
        await page.press("Enter")
        await page.until("document.getElementById('model').textContent === 'toy'")
        await page.until("document.getElementById('t-running').textContent === '0'")
        await page.evaluate("document.getElementById('tab-chat').click()")
        await ask(page, "hi")
        assert (await text_of(page, ".message .figures")).startswith("128 tokens, ")
        assert "alice" not in await page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, location.href])"
        )


async def test_a_lost_server_is_told_and_found_again() -> None:
    port = free_port()
    async with orchestrator_on_fakes(FakeVerifier(), watch_rounds=True) as (_, one), browsing() as browser:
        async with gateway_to(one.address, listen_address=f"127.0.0.1:{port}"):
            page = await browser.open(f"http://127.0.0.1:{port}/")
            await page.until("document.getElementById('state').className === 'ready'")
            await page.evaluate("document.getElementById('tab-live').click()")
            await page.until("document.getElementById('t-running').textContent === '0'")
        await page.until("document.getElementById('state').className === 'gone'")
        assert "does not answer" in await text_of(page, "#gone")
        assert await page.evaluate("document.getElementById('send').disabled") is True
        async with gateway_to(one.address, listen_address=f"127.0.0.1:{port}"):
            await page.until("document.getElementById('state').className === 'ready'")
            assert await page.evaluate("document.getElementById('gone').hidden") is True
            await page.until("document.getElementById('live-note').hidden")


async def test_a_server_that_is_lost_in_an_answer_is_told_there_and_the_question_is_kept() -> None:
    port = free_port()
    verifier = FakeVerifier(pass_s=0.05)
    async with orchestrator_on_fakes(verifier) as (_, one), browsing() as browser:
        env = {"LISTEN_ADDRESS": f"127.0.0.1:{port}", "ORCHESTRATOR_ADDRESS": one.address}
        command = (sys.executable, "-m", "coppice.gateway")
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | env)
        try:
            await answering(port)
            page = await browser.open(f"http://127.0.0.1:{port}/")
            await page.until("document.getElementById('model').textContent === 'toy'")
            await page.evaluate("document.getElementById('question').focus()")
            await page.type("where am I?")
            await page.press("Enter")
            await page.until("(document.querySelector('.message.assistant span')?.textContent.length ?? 0) > 3")
        finally:
            process.kill()
            await process.wait()
        await page.until(FIGURES)
        assert await text_of(page, ".message .figures") == "The connection to the server is lost."
        told = "getComputedStyle(document.querySelector('.message .figures')).color"
        red, green, _ = await page.evaluate(f"{told}.match(/\\d+/g).map(Number)")
        assert red > 2 * green
        assert await page.evaluate("document.getElementById('question').value") == "where am I?"
        await page.until("document.getElementById('state').className === 'gone'")
        async with gateway_to(one.address, listen_address=f"127.0.0.1:{port}"):
            await page.until("document.getElementById('state').className === 'ready'")
            await page.evaluate("document.getElementById('send').click()")
            last = "[...document.querySelectorAll('.message .figures')].at(-1).textContent"
            await page.until(f"{last}.startsWith('128 tokens')")
            assert await page.evaluate("document.getElementById('question').value") == ""


async def answering(port: int) -> None:
    """Wait for a gateway."""
    async with asyncio.timeout(30.0):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_needs_no_sideways_scrolling(scheme: str) -> None:
    verifier = FakeVerifier(chat_template=TEMPLATE, reroots=True)
    async with page_of(verifier, width=400, scheme=scheme, watch_rounds=True) as (_, page, _):
        await page.evaluate("document.getElementById('tab-live').click()")
        await page.until("document.getElementById('t-running').textContent === '0'")
        await page.evaluate("document.getElementById('tab-chat').click()")
        await ask(page, "hi" * 100)
        for view in ("chat", "compare", "live"):
            await page.evaluate(f"document.getElementById('tab-{view}').click()")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 400, view
        await page.until("document.querySelector('#tree .node') !== null")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        red = await page.evaluate("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert (red > 128) is (scheme == "light")


# Contrast of two colours as WCAG 2.2 defines it (section 1.4.3).
CONTRAST = """((text, ground) => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0.05);
  return Math.max(light(text), light(ground)) / Math.min(light(text), light(ground));
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_hints_can_be_read_and_buttons_stay_where_they_are(scheme: str) -> None:
    async with page_of(FakeVerifier(chat_template=TEMPLATE, pass_s=0.05), width=400, scheme=scheme) as (_, page, _):
        style = "getComputedStyle(document.getElementById('question'){}).{}"
        colours = style.format(", '::placeholder'", "color"), style.format("", "backgroundColor")
        assert await page.evaluate(f"{CONTRAST}({', '.join(colours)})") >= 4.5
        await page.evaluate("document.getElementById('tab-compare').click()")
        middle = "(({{top, bottom}}) => (top + bottom) / 2)({}.getBoundingClientRect())"
        check = "document.getElementById('forced')"
        apart = f"{middle.format(check)} - {middle.format(f'{check}.parentElement')}"
        assert abs(await page.evaluate(apart)) <= 1
        place = "(({left, top}) => [left, top])(document.getElementById('go').getBoundingClientRect())"
        before = await page.evaluate(place)
        await page.evaluate("document.getElementById('prompt').focus()")
        await page.type("hi")
        await page.evaluate("document.getElementById('go').click()")
        assert await page.evaluate("document.getElementById('cancel').hidden") is False
        assert await page.evaluate(place) == before
