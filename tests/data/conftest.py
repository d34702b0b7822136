from tests.data.servers import cache, hub_server, server  # noqa: F401  # fixtures
