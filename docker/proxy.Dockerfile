# The proxy before Temporal for invited Macs: no torch, no MLX, no key that writes. Build from the project's root.
FROM python:3.11-slim
WORKDIR /app
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt \
        boto3 cryptography cyclopts grpcio psutil pydantic rich structlog temporalio \
    && useradd --create-home --uid 1000 stoa
COPY stoa stoa
COPY activities activities
COPY cli cli
COPY configs configs
USER stoa
EXPOSE 7234
ENTRYPOINT ["python", "-m", "cli.main", "proxy"]
CMD ["configs/demo.toml", "--listen", "0.0.0.0:7234", "--behind-tls"]
