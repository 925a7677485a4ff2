# The host that trains nothing: the command `stoa` with the proxy for invited Macs, the bucket, and a small Temporal to try
# things with. No torch and no MLX. Build from the project's root.
FROM python:3.11-slim
WORKDIR /app
RUN useradd --create-home --uid 1000 stoa && mkdir /data /state && chown stoa /data /state
COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt "/source[proxy,local]"
COPY configs configs
COPY docker/bucket.py .
ENV STOA_STATE=/state
USER 1000
EXPOSE 7234 8333
ENTRYPOINT ["stoa"]
CMD ["--help"]
