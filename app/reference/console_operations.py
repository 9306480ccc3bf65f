"""Health checks, metrics, the admin API and this description itself, one entry per route."""

from __future__ import annotations

from app.admin.api import MAX_LISTED, PauseBody, StepBody
from app.admin.keys import CreateKeyBody
from app.reference import admin_answers as answers
from app.reference.operation import Json, Operation, Parameter
from engine.core.limits import LIMIT_TABLE, Limits

HEALTH, STATE, LIMITS, ENGINE, KEYS = "Health", "State", "Limits", "Engine", "Keys and audit"

_DEAD = {503: "the engine is dead"}
_LIMIT = Parameter("limit", "query", "How many.", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED})
_REQUEST_ID = Parameter("request_id", "path", "Its id, as the state shows it.",
                        {"type": "string", "pattern": "^[^/]+$", "minLength": 1}, required=True,
                        example="no-such-request")  # fmt: skip


def _limits_patch() -> Json:
    """What PATCH takes, made of the table that checks it."""
    types = {"int": "integer", "float": "number", "seconds": ["number", "null"], "choice": "string"}
    properties: Json = {}
    for row in LIMIT_TABLE:
        schema: Json = {"type": types[row.kind], "description": row.help}
        if row.choices:
            schema["enum"] = list(row.choices)
        else:
            schema["exclusiveMinimum" if row.kind == "seconds" else "minimum"] = row.low
            if row.high is not None:
                schema["maximum"] = row.high
        properties[row.name] = schema
    return {"type": "object", "title": "LimitsPatch", "properties": properties, "additionalProperties": False}


OPERATIONS: tuple[Operation, ...] = (
    Operation("healthz", HEALTH, "Is the process up", answer=answers.Health),
    Operation("health", HEALTH, "Is the engine alive", answer=answers.Health, failures={503: "the engine is dead"}),
    Operation(
        "readyz", HEALTH, "Is it ready for work", "Never refused for a full queue.", answer=answers.Readiness,
        failures={503: "loading, dead, draining, stuck or paused: `reasons` says which"},
    ),
    Operation("metrics", HEALTH, "Prometheus metrics",
              "vLLM's names, and `pagedeck_` for what has no such name. OpenMetrics if the client accepts it.",
              text="text/plain"),
    Operation("openapi", HEALTH, "This description", "OpenAPI 3.2.", answer_schema={"type": "object"}),
    Operation("state", STATE, "The engine's state", "Everything at one point between two steps.",
              answer=answers.State),
    Operation("blocks", STATE, "Every block", "State, references, owners and hash.", answer=answers.Blocks),
    Operation(
        "steps", STATE, "Records of steps", "Oldest first; the latest ones without `from`.", answer=answers.Steps,
        parameters=(
            Parameter("from", "query", "The first step.", {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}),
            _LIMIT,
        ),
    ),
    Operation("phases", STATE, "Where the time of a step goes", "Medians over the latest steps, in milliseconds.",
              answer=answers.Phases, parameters=(_LIMIT,)),
    Operation(
        "one_step", STATE, "One step", "What was decided and done in it.", answer=answers.Step,
        errors={404: "not in the trace any more, or not yet"},
        parameters=(Parameter("step", "path", "Its number.", {"type": "integer", "minimum": 0}, required=True,
                              example="1"),),
    ),
    Operation(
        "one_request", STATE, "One request",
        "When its sequences waited, were computed, wrote and were preempted; no text.", answer=answers.RequestHistory,
        errors={404: "it neither lives nor is in the trace any more"},
        parameters=(_REQUEST_ID,),
    ),
    Operation(
        "engine_events", STATE, "Live state, streamed",
        "Server-sent events `hello`, `key` (the whole state), `delta`, `tick`, `bye`; it has no end. "
        "`Last-Event-ID` resumes it.",
        is_endless=True, event=answers.EngineEvent,
        parameters=(Parameter("last-event-id", "header", "The id of the last event that came.",
                              {"type": "string", "pattern": "^[A-Za-z0-9]{1,64}-[0-9]{1,15}$"}),),
    ),
    Operation("info", STATE, "Model and settings", answer=answers.Info),
    Operation("get_limits", LIMITS, "The limits", "With an ETag for the PATCH.", answer=Limits),
    Operation("limits_table", LIMITS, "The limits, explained", answer=answers.LimitsTable),
    Operation(
        "patch_limits", LIMITS, "Change limits", "Any subset, all or nothing, answered when they hold.",
        body_schema=_limits_patch(), answer=Limits, effect="changes",
        parameters=(Parameter("if-match", "header", "The ETag that GET gave; `*`: whatever they are now.",
                              example="*"),),
        errors={412: "somebody else changed them: `error.version`, `error.current`", 422: "a value is out of its range",
                428: "If-Match is missing", **_DEAD},
        example={"max_num_seqs": 8},
    ),
    Operation("pause", ENGINE, "Pause the engine", "For everyone, after the present step.", body=(PauseBody,),
              answer=answers.Done, errors=_DEAD, example={"reason": "looking at a step"}, effect="changes"),
    Operation("resume", ENGINE, "Resume it", answer=answers.Done, errors=_DEAD, effect="changes"),
    Operation(
        "step", ENGINE, "Run single steps", "Of a paused engine; fewer if it runs out of work.", body=(StepBody,),
        body_required=False, answer=answers.Stepped, errors={409: "the engine is not paused", **_DEAD},
        example={"n": 1}, effect="changes",
    ),
    Operation("abort_request", ENGINE, "Abort a request", "A receipt; the same when asked again.",
              answer=answers.Receipt, errors=_DEAD, effect="changes",
              parameters=(_REQUEST_ID,)),
    Operation("reset_prefix_cache", ENGINE, "Reset the prefix cache", "Cached blocks become free.",
              answer=answers.CacheReset, errors=_DEAD, effect="changes"),
    Operation("drain", ENGINE, "Drain the engine", "No new requests from now on. Only a restart takes it back.",
              answer=answers.Done, errors=_DEAD, effect="ends"),
    Operation("list_keys", KEYS, "List the keys", "Those of flags and created ones, never their texts.",
              answer=answers.KeyList),
    Operation(
        "create_key", KEYS, "Create a key",
        "Its text is in this answer only. The first key turns authentication on, so it must be an admin's.",
        body=(CreateKeyBody,), answer=answers.CreatedKey, status=201, effect="changes",
        errors={409: "the first key is no admin's, or there are too many"},
        example={"label": "notebook", "role": "inference"},
    ),
    Operation(
        "revoke_key", KEYS, "Revoke a key", "It holds no more, and what is being answered to it ends.",
        answer=answers.RevokedKey, effect="ends",
        errors={404: "no such key", 409: "it is from a flag, or the last admin's while there are others"},
        parameters=(Parameter("key_id", "path", "Its id, as the list shows it.",
                              {"type": "string", "pattern": "^[^/]+$", "minLength": 1}, required=True,
                              example="0123456789abcdef"),),
    ),
    Operation("audit", KEYS, "The audit log", "Newest first.", answer=answers.Audit, parameters=(_LIMIT,)),
)  # fmt: skip
