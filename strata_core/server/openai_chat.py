"""placeholder until parsers exist"""
import flask
blueprint = flask.Blueprint("openai_chat", __name__)
