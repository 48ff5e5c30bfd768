"""Analyses: requests that call the model directly, beside the batch. Torch only.

counterfactual         one edit -> the same individual's two texts, and where they part
numbers                texts or rows -> medians, intervals and quantiles, from a fitted regressor or
                       the number head of a model that was trained on values
number_counterfactual  a text or row, its observed number and an edit -> the number after the edit
tokens                 a text -> its tokens; how one of them was chosen
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from causal_qwen.serving.requests import TextRequest
from causal_qwen.serving.schemas import (
    CounterfactualBody,
    Edit,
    NumberCounterfactualBody,
    NumbersBody,
    RequestError,
    TokensBody,
)
from causal_qwen.serving.service import Service
from causal_qwen.terminal import finite
from causal_qwen.text.edits import replace_number, replace_word

MISTAKES = (ValueError, KeyError, TypeError, ArithmeticError)  # of what a request asks for
LEVEL = 0.9  # of an interval where none is named


def _torch_engine(service: Service) -> Any:
    if service.backend.kind != "torch":
        raise RequestError("This server runs without torch; it answers texts only.", None, 501)
    return service.backend


# ---------------------------------------------------------------- counterfactuals


def counterfactual(service: Service, body: CounterfactualBody) -> Callable[[], dict[str, Any]]:
    """Check a request. -> the work"""
    backend = _torch_engine(service)
    request = TextRequest.of(body, service.limits)
    request.settings.setdefault("causal_mode", "causal")
    if request.n != 1 or request.stream or request.stop or len(request.prompts) != 1:
        raise RequestError("A counterfactual is of one prompt, without n, stop and stream.")
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
        from causal_qwen.engines.torch import chat_inputs

        room = [request.max_tokens]  # for new tokens, in both worlds

        def read(prompt: Any) -> Any:
            length = len(service.encode(prompt, request.is_chat).ids)
            room.append(backend.context - length)
            return chat_inputs(backend.processor, prompt) if request.is_chat else prompt

        prompt = request.prompts[0]
        options = {name: value for name, value in call.options.items() if value is not None}
        try:
            text, change = read(prompt), _edit(analysis, body.edit, prompt, read, backend.processor)
            found = analysis.counterfactual(
                backend.model,
                text,
                options.pop("individual"),
                change,
                semantics=body.semantics,
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
    analysis: Any, edit: Edit, prompt: Any, read: Callable[[Any], Any], processor: Any
) -> Any:
    """The edit of a request as one of the analysis's."""
    by = edit.by
    if edit.token is not None:
        return analysis.ChangedToken(edit.token, by if isinstance(by, int) else str(by))
    if edit.prompt is not None or edit.messages is not None:
        if (edit.messages is None) == isinstance(prompt, list):
            raise RequestError("edit must be of the factual text's kind, a prompt or messages.")
        return analysis.ChangedPrompt(
            read(edit.prompt or [message.plain() for message in edit.messages or ()])
        )
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if edit.number is not None:
        value = float(by)  # type: ignore[arg-type]
        if processor.encode_numbers == "value":
            return analysis.ChangedNumber(edit.number, value)
        changed: str | None = replace_number(text, edit.number, value)
    else:
        changed = replace_word(text, str(edit.word), str(by))
    if changed is None:
        raise RequestError(f"{str(edit.word)[:100]!r} is not a word of the prompt.", "edit")
    if isinstance(prompt, str):
        return analysis.ChangedPrompt(read(changed))
    return analysis.ChangedPrompt(read([*prompt[:-1], {**prompt[-1], "content": changed}]))


# ---------------------------------------------------------------- numbers


def numbers(service: Service, body: NumbersBody) -> Callable[[], dict[str, Any]]:
    """Check a request. -> the work"""
    backend = _torch_engine(service)
    service.check_model(body.model)
    inputs: list[Any] = body.input if isinstance(body.input, list) else [body.input]
    is_row = isinstance(inputs[0], dict)
    quantiles = body.quantiles or []
    name = _regressor_name(service, body.regressor)
    if name is None and (is_row or backend.model.config.encode_numbers != "value"):
        raise RequestError(
            "The number head of this model is not trained; start the server with --regressor "
            "DIRECTORY (causal-qwen fit), or serve a model trained on values.",
            "regressor",
        )

    def work() -> dict[str, Any]:
        try:
            if name is None:
                found = _of_model(backend, inputs, body.levels or [LEVEL], quantiles)
            else:
                regressor = open_regressor(service, name)
                found = _of_regressor(regressor, inputs, body.target, body.levels, quantiles)
        except MISTAKES as error:
            raise RequestError(str(error)) from None
        data = [{"index": index, **finite(one)} for index, one in enumerate(found)]
        return {"object": "list", "model": service.name, "regressor": name, "data": data}

    return work


def _regressor_name(service: Service, name: str | None) -> str | None:
    """The only one where none is named; None if there is none."""
    if name is None and len(service.regressors) == 1:
        (name,) = service.regressors
    if name is not None and name not in service.regressors:
        known = ", ".join(service.regressors) or "none (start it with --regressor)"
        raise RequestError(f"There is no regressor {name!r}; this server has {known}.", None, 404)
    return name


def number_counterfactual(
    service: Service, body: NumberCounterfactualBody
) -> Callable[[], dict[str, Any]]:
    """Check a request. -> the work"""
    _torch_engine(service)
    service.check_model(body.model)
    before: Any = body.input
    after: Any = body.edited
    if isinstance(before, str) != isinstance(after, str) or before == after:
        raise RequestError("edited must be another text, or another row, as input is.", "edited")
    name = _regressor_name(service, body.regressor)
    if name is None:
        raise RequestError("The model's own head keeps no individual; name a regressor.")

    def work() -> dict[str, Any]:
        from causal_qwen.tables.frames import TEXT

        try:
            regressor = open_regressor(service, name)
            target = regressor.target_name(body.target)
            row, changes = before, {TEXT: after}
            if isinstance(before, str):
                regressor = regressor if regressor.columns_ is None else regressor.of_sentences()
            else:
                row = dict.fromkeys(regressor.columns_ or ()) | before
                changes = {one: cell for one, cell in after.items() if cell != row.get(one)}
            found = regressor.counterfactual(row, body.observed, changes, target=target)
        except MISTAKES as error:
            raise RequestError(str(error)) from None
        shown = {one: getattr(found, one) for one in ("factual", "median", "low", "high", "level")}
        return {"object": "number.counterfactual", "regressor": name, **finite(shown)}

    return work


# ---------------------------------------------------------------- tokens

_TYPICAL: WeakKeyDictionary[Service, Any] = WeakKeyDictionary()  # U in ordinary text, measured once


def tokens(service: Service, body: TokensBody) -> Callable[[], dict[str, Any]]:
    """Check a request. -> the work"""
    backend = _torch_engine(service)
    service.check_model(body.model)
    text = body.input
    service.encode(text, is_chat=False)  # within the limits

    def work() -> dict[str, Any]:
        from causal_qwen.analysis import token_view

        opened = backend.model, backend.processor
        found = {"object": "tokens", "tokens": token_view.split_tokens(*opened, text)}
        if body.index is not None:
            if service not in _TYPICAL:
                _TYPICAL[service] = token_view.measure_typical(*opened)
            try:
                view = token_view.explain_token(*opened, text, body.index, _TYPICAL[service])
            except MISTAKES as error:
                raise RequestError(str(error), "index") from None
            found["view"] = finite(view.to_dict())
        return found

    return work


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


def open_regressor(service: Service, name: str) -> Any:
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
