# The GPU box: trainer worker with its control child. Build from the project's root. Nothing listens here, so there is no
# health check: a worker whose engine hangs ends by itself, and Temporal notices one that is gone within its heartbeat.
FROM python:3.11-slim
WORKDIR /app
RUN useradd --create-home --uid 1000 stoa && mkdir /state && chown stoa /state
COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt "/source[gpu]"
COPY configs configs
ENV STOA_STATE=/state
USER 1000
ENTRYPOINT ["python", "-m", "trainer_gpu.worker"]
CMD ["configs/demo.toml"]
