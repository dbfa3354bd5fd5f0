# The agent of a database behind its HTTP server (docs/how-to/serve.md), on the ops image. From the repository's root:
#   docker build -f infra/images/ops.Dockerfile -t sqltrain-ops .
#   docker build -f infra/images/serve.Dockerfile -t sqltrain-serve .
#   docker run -p 8080:8080 -v ./databases:/srv/agent/databases:ro -v ./keys.yaml:/srv/agent/keys.yaml:ro \
#     -v ./conf/local:/srv/agent/conf/local:ro -v store:/store --env-file endpoints.env sqltrain-serve shop --model endpoint:big
# A database in a file needs its folder mounted too, at the place that its card names. Not run here: tests/infra/ parses it.
FROM sqltrain-ops

USER sqltrain
ENV PATH=/home/sqltrain/.local/bin:$PATH \
    SQLTRAIN_ENDPOINTS=/srv/agent/conf/local/endpoints.yaml
RUN pip install --user -c constraints.txt starlette uvicorn mcp pymysql

WORKDIR /srv/agent
ENTRYPOINT ["sqltrain", "serve", "--host", "0.0.0.0", "--keys", "keys.yaml", "--feedback", "/store/feedback"]
CMD ["--help"]
