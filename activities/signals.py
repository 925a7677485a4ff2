"""What a workflow does with a signal that says nothing: it drops it.

The SDK drops signals whose argument is of another type, but not null, nor a wrong number of arguments: those fail the
workflow's task, which is tried again for ever while the workflow stands still. Every signal of the project has one argument.
"""

from temporalio import workflow
from temporalio.worker import HandleSignalInput, Interceptor, WorkflowInboundInterceptor, WorkflowInterceptorClassInput


class _Inbound(WorkflowInboundInterceptor):
    async def handle_signal(self, input: HandleSignalInput) -> None:
        """Pass a signal on if it has its one argument."""
        if len(input.args) != 1 or input.args[0] is None:
            workflow.logger.warning("signal_dropped", extra={"signal": input.signal})
            return
        await super().handle_signal(input)


class DropEmptySignals(Interceptor):
    """For workers of workflows."""

    def workflow_interceptor_class(self, input: WorkflowInterceptorClassInput) -> type[WorkflowInboundInterceptor]:
        """Stands before each workflow's handlers."""
        return _Inbound
