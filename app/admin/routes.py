"""The rows of the console in the table of routes."""

from __future__ import annotations

from app.access import Role, RouteRow
from app.admin import api, keys, pages

_READ, _ADMIN = Role.READ_ONLY, Role.ADMIN

ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/engine", ("GET",), pages.engine_page, _READ, "engine_page"),
    RouteRow("/engine/requests/{request_id}", ("GET",), pages.request_page, _READ, "request_page"),
    RouteRow("/engine/fragments/requests/{request_id}", ("GET",), pages.request_fragment, _READ, "request_fragment"),
    RouteRow("/admin", ("GET",), pages.admin_page, _READ, "admin_page"),
    RouteRow("/admin/fragments/audit", ("GET",), pages.audit_rows, _ADMIN, "audit_rows"),
    RouteRow("/admin/fragments/keys", ("GET",), pages.key_rows, _ADMIN, "key_rows"),
    RouteRow("/metrics", ("GET",), api.metrics, _READ, "metrics"),
    RouteRow("/admin/api/state", ("GET",), api.state, _READ, "state"),
    RouteRow("/admin/api/blocks", ("GET",), api.blocks, _READ, "blocks"),
    RouteRow("/admin/api/steps", ("GET",), api.steps, _READ, "steps"),
    RouteRow("/admin/api/steps/{step:int}", ("GET",), api.one_step, _READ, "one_step"),
    RouteRow("/admin/api/phases", ("GET",), api.phases, _READ, "phases"),
    RouteRow("/admin/api/events", ("GET",), api.events, _READ, "engine_events"),
    RouteRow("/admin/api/info", ("GET",), api.info, _READ, "info"),
    RouteRow("/admin/api/limits", ("GET",), api.get_limits, _READ, "get_limits"),
    RouteRow("/admin/api/limits", ("PATCH",), api.patch_limits, _ADMIN, "patch_limits"),
    RouteRow("/admin/api/limits/table", ("GET",), api.get_limits_table, _READ, "limits_table"),
    RouteRow("/admin/api/engine/pause", ("POST",), api.pause, _ADMIN, "pause"),
    RouteRow("/admin/api/engine/resume", ("POST",), api.resume, _ADMIN, "resume"),
    RouteRow("/admin/api/engine/step", ("POST",), api.step, _ADMIN, "step"),
    RouteRow("/admin/api/engine/drain", ("POST",), api.drain, _ADMIN, "drain"),
    RouteRow("/admin/api/requests/{request_id}", ("GET",), api.one_request, _READ, "one_request"),
    RouteRow("/admin/api/requests/{request_id}/abort", ("POST",), api.abort_request, _ADMIN, "abort_request"),
    RouteRow("/admin/api/prefix-cache/reset", ("POST",), api.reset_prefix_cache, _ADMIN, "reset_prefix_cache"),
    RouteRow("/admin/api/keys", ("GET",), keys.list_keys, _ADMIN, "list_keys"),
    RouteRow("/admin/api/keys", ("POST",), keys.create_key, _ADMIN, "create_key"),
    RouteRow("/admin/api/keys/{key_id}", ("DELETE",), keys.revoke_key, _ADMIN, "revoke_key"),
    RouteRow("/admin/api/audit", ("GET",), api.audit, _ADMIN, "audit"),
)
