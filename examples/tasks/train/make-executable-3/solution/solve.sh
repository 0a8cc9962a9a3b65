#!/bin/bash
chmod +x week.sh
