"use strict";

SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  displayRequestDuration: true,
  // The default validator is a service on the internet, which would get the document's address.
  validatorUrl: null,
});
