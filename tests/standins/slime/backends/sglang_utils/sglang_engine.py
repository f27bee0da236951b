"""In the place of what slime has under this name."""

import contextlib
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import requests


class SGLangEngine:
    def __init__(self, url):
        self.url = url

    def _make_request(self, endpoint, payload=None):
        response = requests.post(f"{self.url}/{endpoint}", json=payload or {})
        try:
            response.raise_for_status()
        except requests.exceptions.HTTPError as error:
            error.add_note(f"{response.text=}")
            raise
        return response.json()

    def init_weights_update_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend
    ):
        fields = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        fields |= {"world_size": world_size, "group_name": group_name, "backend": backend}
        return self._make_request("init_weights_update_group", fields)

    def destroy_weights_update_group(self, group_name):
        with contextlib.suppress(requests.exceptions.RequestException):
            return self._make_request("destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self, names, dtypes, shapes, group_name, flush_cache=False, weight_version=None, load_format=None
    ):
        fields = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
        fields |= {"flush_cache": flush_cache, "weight_version": weight_version, "load_format": load_format}
        return self._make_request("update_weights_from_distributed", fields)

    def pause_generation(self):
        self._make_request("pause_generation")

    def flush_cache(self):
        while True:
            try:
                return urlopen(f"{self.url}/flush_cache").close()
            except HTTPError:
                time.sleep(0.1)

    def continue_generation(self):
        self._make_request("continue_generation")

    def get_url(self):
        return self.url

    def shutdown(self):
        requests.get(f"{self.url}/workers").raise_for_status()
