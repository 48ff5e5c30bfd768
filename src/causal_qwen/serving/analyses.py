"""Analyses: counterfactuals and numbers, for which a request calls the model directly. Torch only.

counterfactual   one edit -> the same individual's two texts, and where they part
numbers          texts or rows -> medians, intervals and quantiles, from a fitted regressor or
                 the number head of a model that was trained on values
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from causal_qwen.options import SEMANTICS, check_choice
from causal_qwen.serving.limits import Limits
from causal_qwen.serving.requests import (
    Field,
    RequestError,
    TextRequest,
    check_fields,
    fields_of,
)
from causal_qwen.serving.service import Service
from causal_qwen.terminal import finite
from causal_qwen.text.edits import replace_number, replace_word

EDITS = {
    "prompt": Field((str,), "Another prompt."),
    "messages": Field((list,), "Another conversation."),
    "word": Field((str,), "A word of the prompt, or of the last message, that `by` replaces."),
    "number": Field((int,), "The number of the prompt, from 0, that gets the value `by`."),
    "token": Field((int,), "The token of the factual text, from 0, that becomes `by`."),
    "by": Field((str, int, float), "What replaces a word, a number or a token."),
}
COUNTERFACTUAL_FIELDS = {
    **fields_of("chat"),
    **fields_of("completion"),
    "edit": Field((dict,), f"One of {', '.join(EDITS)}; the last three with `by`."),
    "semantics": Field((str,), "pearl (all noise is kept) or disco (chance is drawn anew)."),
}
NUMBER_FIELDS = {
    "model": Field((str,), "The id of the served model."),
    "input": Field((str, list, dict), "A text or a row (an object), or a list of them."),
    "regressor": Field((str,), "The name of a regressor; the only one if left out."),
    "target": Field((str,), "The target of a regressor with several."),
    "levels": Field((list,), "Levels of the intervals; [0.9] by default."),
    "quantiles": Field((list,), "Probabilities of quantiles, such as [0.1, 0.5]."),
}
MAX_INPUTS = 256
MISTAKES = (ValueError, KeyError, TypeError, ArithmeticError)  # of what a request asks for
MAX_LEVELS = 20
LEVEL = 0.9  # of an interval where none is named


def _torch_backend(service: Service) -> Any:
    if service.backend.kind != "torch":
        raise RequestError("This server runs without torch; it answers texts only.", None, 501)
    return service.backend


# ---------------------------------------------------------------- counterfactuals


def parse_counterfactual(body: Any, limits: Limits) -> tuple[TextRequest, dict[str, Any], str]:
    """-> the factual text's request, the edit, the semantics"""
    given = check_fields(body, COUNTERFACTUAL_FIELDS)
    edit = check_fields(given.pop("edit", {}), EDITS, {})
    kinds = set(edit) - {"by"}
    if len(kinds) != 1 or ("by" in edit) != (kinds <= {"word", "number", "token"}):
        raise RequestError(
            "edit needs one of prompt and messages, or one of word, number and token beside by.",
            "edit",
        )
    try:
        semantics = check_choice("semantics", given.pop("semantics", "pearl"), SEMANTICS)
    except ValueError as error:
        raise RequestError(str(error), "semantics") from None
    kind = "chat" if "messages" in given else "completion"
    request = TextRequest.parse({"causal_mode": "causal", **given}, kind, limits)
    if request.n != 1 or request.stream or request.stop or len(request.prompts) != 1:
        raise RequestError("A counterfactual is of one prompt, without n, stop and stream.")
    return request, edit, semantics


def counterfactual(service: Service, body: Any) -> Callable[[], dict[str, Any]]:
    """Check a request. -> the work"""
    backend = _torch_backend(service)
    request, edit, semantics = parse_counterfactual(body, service.limits)
    service.check_model(request.model)
    call = request.resolve(backend.resolve, backend.default_mode, service.individuals.find)
    if not call.settings.is_noisy:
        raise RequestError(
            f"A counterfactual follows an individual, and mode {call.settings.mode!r} has none; "
            "use 'causal' or 'sampling'.",
            "causal_mode",
        )
    service.encode(request.prompts[0], request.is_chat)  # within the limits

    def work() -> dict[str, Any]:
        from causal_qwen.analysis import counterfactual as analysis
        from causal_qwen.generation.streaming import chat_inputs

        room = [request.max_tokens]  # for new tokens, in both worlds

        def read(prompt: Any) -> Any:
            length = len(service.encode(prompt, request.is_chat).ids)
            room.append(backend.context - length)
            return chat_inputs(backend.processor, prompt) if request.is_chat else prompt

        prompt = request.prompts[0]
        options = {name: value for name, value in call.options.items() if value is not None}
        try:
            text, change = read(prompt), _edit(analysis, edit, prompt, read, backend.processor)
            found = analysis.counterfactual(
                backend.model,
                text,
                options.pop("individual"),
                change,
                semantics=semantics,
                exogenous=options.pop("exogenous", None),
                mode=options.pop("causal_mode"),
                processor=backend.processor,
                max_new_tokens=min(room),
                **options,
            )
        except MISTAKES as error:
            raise RequestError(str(error)) from None
        record = {**found.to_dict(), "replay": call.replay(0)}
        record["individual"] = record["replay"].get("individual")
        for world in ("factual", "counterfactual"):
            record[world]["continuation"] = "".join(record[world]["tokens"])
        return {"object": "counterfactual", "model": service.name, **record}

    return work


def _edit(
    analysis: Any, edit: dict[str, Any], prompt: Any, read: Callable[[Any], Any], processor: Any
) -> Any:
    """The edit of a request as one of the analysis's."""
    if "token" in edit:
        by = edit["by"]
        return analysis.ChangedToken(edit["token"], by if isinstance(by, int) else str(by))
    if "prompt" in edit or "messages" in edit:
        other = edit.get("prompt") or edit.get("messages")
        if isinstance(other, str) == isinstance(prompt, list):
            raise RequestError("edit must be of the factual text's kind, a prompt or messages.")
        kind = "completion" if isinstance(other, str) else "chat"
        field = {"completion": "prompt", "chat": "messages"}[kind]
        (other,) = TextRequest.parse({field: other}, kind, Limits()).prompts
        return analysis.ChangedPrompt(read(other))
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if "number" in edit:
        if isinstance(edit["by"], str):
            raise RequestError("by must be a number where a number is edited.", "edit")
        if processor.encode_numbers == "value":
            return analysis.ChangedNumber(edit["number"], float(edit["by"]))
        changed: str | None = replace_number(text, edit["number"], float(edit["by"]))
    else:
        changed = replace_word(text, edit["word"], str(edit["by"]))
    if changed is None:
        raise RequestError(f"{edit['word'][:100]!r} is not a word of the prompt.", "edit")
    if isinstance(prompt, str):
        return analysis.ChangedPrompt(read(changed))
    return analysis.ChangedPrompt(read([*prompt[:-1], {**prompt[-1], "content": changed}]))


# ---------------------------------------------------------------- numbers


def numbers(service: Service, body: Any) -> Callable[[], dict[str, Any]]:
    """Check a request. -> the work"""
    backend = _torch_backend(service)
    given = check_fields(body, NUMBER_FIELDS, {})
    service.check_model(given.get("model"))
    inputs = given.get("input", [])
    inputs = inputs if isinstance(inputs, list) else [inputs]
    is_text = all(isinstance(one, str) and one.strip() for one in inputs)
    is_row = all(isinstance(one, dict) and one for one in inputs)
    if not 0 < len(inputs) <= MAX_INPUTS or not (is_text or is_row):
        raise RequestError(f"input must be 1 to {MAX_INPUTS} texts, or so many rows.", "input")
    levels = _shares("levels", given["levels"]) if "levels" in given else None
    quantiles = _shares("quantiles", given.get("quantiles", []))
    name = given.get("regressor")
    if name is None and len(service.regressors) == 1:
        (name,) = service.regressors
    if name is not None and name not in service.regressors:
        known = ", ".join(service.regressors) or "none (start it with --regressor)"
        raise RequestError(f"There is no regressor {name!r}; this server has {known}.", None, 404)
    if name is None and (is_row or backend.model.config.encode_numbers != "value"):
        raise RequestError(
            "The number head of this model is not trained; start the server with --regressor "
            "DIRECTORY (causal-qwen fit), or serve a model trained on values.",
            "regressor",
        )

    def work() -> dict[str, Any]:
        try:
            if name is None:
                found = _of_model(backend, inputs, levels or [LEVEL], quantiles)
            else:
                regressor = _open_regressor(service, name)
                found = _of_regressor(regressor, inputs, given.get("target"), levels, quantiles)
        except MISTAKES as error:
            raise RequestError(str(error)) from None
        data = [{"index": index, **finite(one)} for index, one in enumerate(found)]
        return {"object": "list", "model": service.name, "regressor": name, "data": data}

    return work


def _shares(name: str, values: list[Any]) -> list[float]:
    is_share = all(isinstance(one, float | int) and 0 < one < 1 for one in values)
    if not is_share or len(values) > MAX_LEVELS:
        raise RequestError(f"{name} must be up to {MAX_LEVELS} numbers between 0 and 1.", name)
    return [float(one) for one in values]


def _record(median: Any, lows: Any, highs: Any, levels: Any, curve: Any, quantiles: Any) -> Any:
    bounds = zip(levels, lows, highs, strict=True)
    return {
        "median": float(median),
        "intervals": [
            {"level": level, "low": float(low), "high": float(high)} for level, low, high in bounds
        ],
        "quantiles": [
            {"p": p, "value": float(value)} for p, value in zip(quantiles, curve, strict=True)
        ],
    }


def _of_model(
    backend: Any, texts: list[str], levels: list[float], quantiles: list[float]
) -> list[dict[str, Any]]:
    found = backend.model.predict(texts, backend.processor)
    records = []
    for one in found:
        bounds = [one.interval(level) for level in levels]
        lows, highs = [low for low, _ in bounds], [high for _, high in bounds]
        curve = [one.quantile(p) for p in quantiles]
        records.append(_record(one.median, lows, highs, levels, curve, quantiles))
    return records


def _of_regressor(
    regressor: Any,
    inputs: list[Any],
    target: str | None,
    levels: list[float] | None,
    quantiles: list[float],
) -> list[dict[str, Any]]:
    """Without `levels`, that of 90%, unless the regressor has too few calibration rows for it."""
    import numpy as np
    from pandas import DataFrame

    name = regressor.target_name(target)
    place = list(regressor.targets_).index(name)
    conformal = regressor.targets_[name].conformal
    if levels is None:
        levels = [LEVEL] if conformal is None or conformal.reaches_level(LEVEL) else []
    _check_reach(conformal, levels, quantiles)
    is_text = isinstance(inputs[0], str)
    if is_text and regressor.columns_ is not None:
        regressor = regressor.of_sentences()
    rows: Any = inputs if is_text else DataFrame(inputs)

    def column(values: Any, inner: int) -> Any:
        """Of the target, where there are several. (N, targets, ...) -> (N, ...)"""
        values = np.asarray(values)
        return values[:, place] if values.ndim > 1 + inner else values

    found = regressor.predict_numbers(rows, levels, quantiles)
    pairs = zip(found, (0, 2, 1), strict=True)
    medians, intervals, curve = (column(part, inner) for part, inner in pairs)
    return [
        _record(
            medians[row],
            list(intervals[row, :, 0]),
            list(intervals[row, :, 1]),
            levels,
            curve[row],
            quantiles,
        )
        for row in range(len(inputs))
    ]


def _check_reach(conformal: Any, levels: list[float], quantiles: list[float]) -> None:
    """Refuse intervals that are infinite for want of calibration rows: JSON has no such number."""
    if conformal is None:
        return
    far = [f"level {one}" for one in levels if not conformal.reaches_level(one)]
    far += [f"quantile {one}" for one in quantiles if not conformal.reaches_quantile(one)]
    if far:
        raise RequestError(
            f"{far[0]} is infinite: the regressor has {len(conformal)} calibration rows; ask for "
            "one nearer to the median."
        )


def _open_regressor(service: Service, name: str) -> Any:
    """A fitted regressor, loaded at its first use; on the served model if it was fitted on it."""
    from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel

    if name not in service.opened:
        backend: Any = service.backend
        directory = service.regressors[name]
        try:
            opened = OpenModel(backend.processor, backend.model)
            regressor = CausalTextRegressor.load(directory, model=opened)
        except ValueError:  # fitted on another backbone
            regressor = CausalTextRegressor.load(directory)
        service.opened[name] = regressor.set_params(verbose=False)
    return service.opened[name]
