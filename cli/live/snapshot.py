"""A picture of the live view without a terminal."""

import asyncio
from collections.abc import Sequence

from cli.live.app import Live


def take(app: Live, size: tuple[int, int], keys: Sequence[str] = (), *, apart_seconds: float = 0.0) -> str:
    """The screen as SVG after two looks so far apart, which give rates, and after these keys."""

    async def run() -> str:
        async with app.run_test(size=size) as pilot:
            await app.refresh_view()
            await asyncio.sleep(apart_seconds)
            await app.refresh_view()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            if keys:
                await app.refresh_view()
            await pilot.pause()
            return app.export_screenshot()

    return asyncio.run(run())
