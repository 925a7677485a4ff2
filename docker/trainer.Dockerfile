# The GPU box: trainer worker with its control child. Build from the project's root.
FROM python:3.11-slim
WORKDIR /app
RUN useradd --create-home --uid 1000 stoa && mkdir /state && chown stoa /state
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY stoa stoa
COPY environments environments
COPY activities activities
COPY workflows workflows
COPY metal metal
COPY worker_mac worker_mac
COPY trainer_gpu trainer_gpu
COPY cli cli
COPY configs configs
RUN pip install --no-cache-dir -c constraints.txt -e ".[gpu]"
USER stoa
ENTRYPOINT ["python", "-m", "trainer_gpu.worker"]
CMD ["configs/demo.toml"]
